"""hidden subjects that are neither filled nor published expire

Revision: 0023, after 0022
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0023"
down_revision = "0022"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Bring the schema here."""
    op.add_column(
        "subjects",
        sa.Column(
            "hidden_since",
            sa.BigInteger(),
            comment="of a hidden subject: since when it counts as idle, database time",
        ),
    )
    op.add_column(
        "subjects",
        sa.Column(
            "hidden_messages",
            sa.BigInteger(),
            nullable=False,
            server_default="0",
            comment="of a hidden subject: its messages then",
        ),
    )


def downgrade() -> None:
    """Go back by one."""
    with op.batch_alter_table("subjects") as batch:
        batch.drop_column("hidden_messages")
        batch.drop_column("hidden_since")
