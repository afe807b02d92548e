"""the audit log

Revision: 0026, after 0025
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0026"
down_revision = "0025"
branch_labels = None
depends_on = None

_BIG_ID = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    """Bring the schema here."""
    op.create_table(
        "access_audit",
        sa.Column("audit_id", _BIG_ID, autoincrement=True, nullable=False),
        sa.Column("at_ms", sa.BigInteger(), nullable=False, comment="calendar of the server"),
        sa.Column("who", sa.String(200), nullable=False, comment="principal; '': not known"),
        sa.Column("remote", sa.String(200), nullable=False),
        sa.Column("did", sa.String(200), nullable=False),
        sa.Column("subject", sa.String(200), nullable=False),
        sa.Column("group", sa.String(200), nullable=False),
        sa.Column("outcome", sa.String(16), nullable=False),
        sa.Column("code", sa.Integer(), nullable=False, comment="0: no error"),
        sa.Column("detail", sa.String(200), nullable=False),
        sa.Column("times", sa.BigInteger(), nullable=False),
        sa.Column("server", sa.String(200), nullable=False),
        sa.PrimaryKeyConstraint("audit_id", name="pk_access_audit"),
        comment="names and numbers; never keys, values, tokens",
        sqlite_autoincrement=True,
    )
    op.create_index("ix_access_audit_at_ms", "access_audit", ["at_ms"])


def downgrade() -> None:
    """Go back by one."""
    op.drop_table("access_audit")
