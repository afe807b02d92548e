"""hidden subjects, and what became of them

Revision: 0019, after 0018
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0019"
down_revision = "0018"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Bring the schema here."""
    op.add_column(
        "subjects",
        sa.Column(
            "hidden_for",
            sa.String(200),
            nullable=False,
            server_default="",
            comment="its target, while it is hidden",
        ),
    )
    op.add_column(
        "operations",
        sa.Column(
            "replaces",
            sa.Boolean(),
            nullable=False,
            server_default=sa.false(),
            comment="older partitions expire once the route has changed",
        ),
    )
    op.create_table(
        "publications",
        sa.Column("hidden", sa.String(200), primary_key=True),
        sa.Column("target", sa.String(200), nullable=False),
        sa.Column("operation_id", sa.BigInteger(), nullable=False),
        sa.Column("replaces", sa.Boolean(), nullable=False),
        comment="hidden subjects that were published, so that a repeat changes nothing",
    )


def downgrade() -> None:
    """Go back by one."""
    op.drop_table("publications")
    with op.batch_alter_table("operations") as batch:
        batch.drop_column("replaces")
    with op.batch_alter_table("subjects") as batch:
        batch.drop_column("hidden_for")
