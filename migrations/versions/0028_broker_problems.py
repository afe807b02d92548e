"""brokers tell why they take no writes

Revision: 0028, after 0027
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0028"
down_revision = "0027"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Bring the schema here."""
    op.add_column(
        "brokers",
        sa.Column(
            "problem",
            sa.String(512),
            nullable=False,
            server_default="",
            comment="why it takes no writes; empty: it takes them, or told no reason",
        ),
    )


def downgrade() -> None:
    """Go back by one."""
    with op.batch_alter_table("brokers") as batch:
        batch.drop_column("problem")
