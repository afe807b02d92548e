"""principals have a limit of consumers, and sessions say whose they are

Revision: 0033, after 0032
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0033"
down_revision = "0032"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Bring the schema here."""
    op.add_column(
        "access_quotas",
        sa.Column(
            "sessions",
            sa.BigInteger(),
            nullable=False,
            server_default="0",
            comment="0: no limit",
        ),
    )
    op.add_column(
        "sessions",
        sa.Column(
            "principal",
            sa.String(200),
            nullable=False,
            server_default="",
            comment="whose consumer it is; empty: not known, or without a limit",
        ),
    )
    op.create_index(op.f("ix_sessions_principal"), "sessions", ["principal"])


def downgrade() -> None:
    """Go back by one."""
    op.drop_index(op.f("ix_sessions_principal"), table_name="sessions")
    with op.batch_alter_table("sessions") as batch:
        batch.drop_column("principal")
    with op.batch_alter_table("access_quotas") as batch:
        batch.drop_column("sessions")
