"""brokers that were refused under the name of another

Revision: 0003, after 0002
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Bring the schema here."""
    op.create_table(
        "refused_brokers",
        sa.Column("broker_group", sa.String(length=200), nullable=False),
        sa.Column("address", sa.String(length=512), nullable=False),
        sa.Column("broker_id", sa.String(length=512), nullable=False),
        sa.Column(
            "expires_at",
            sa.BigInteger(),
            nullable=False,
            comment="refused again and again until then",
        ),
        sa.PrimaryKeyConstraint("broker_group", "address", name=op.f("pk_refused_brokers")),
    )


def downgrade() -> None:
    """Go back by one."""
    op.drop_table("refused_brokers")
