"""brokers and metaservers tell their versions

Revision: 0027, after 0024
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0027"
down_revision = "0026"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Bring the schema here."""
    op.add_column(
        "brokers",
        sa.Column(
            "version",
            sa.String(64),
            nullable=False,
            server_default="",
            comment="of its program; empty: it told none",
        ),
    )
    op.create_table(
        "metaservers",
        sa.Column(
            "holder", sa.String(64), nullable=False, comment="random, of the running program"
        ),
        sa.Column("address", sa.String(512), nullable=False),
        sa.Column("version", sa.String(64), nullable=False),
        sa.Column("expires_at", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("holder", name="pk_metaservers"),
        comment="the metaservers at work",
    )


def downgrade() -> None:
    """Go back by one."""
    op.drop_table("metaservers")
    with op.batch_alter_table("brokers") as batch:
        batch.drop_column("version")
