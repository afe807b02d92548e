"""a partition that is drained may have parked messages, which its children take over

Revision: 0015, after 0014
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0015"
down_revision = "0014"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Bring the schema here."""
    op.add_column(
        "drained",
        sa.Column(
            "parked",
            sa.Boolean(),
            nullable=False,
            server_default=sa.false(),
            comment="the group had parked messages on it, which its children take over",
        ),
    )


def downgrade() -> None:
    """Go back by one."""
    with op.batch_alter_table("drained") as batch:
        batch.drop_column("parked")
