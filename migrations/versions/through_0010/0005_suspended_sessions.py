"""sessions that hand over what they hold and get nothing new

Revision: 0005, after 0004
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Bring the schema here."""
    op.add_column(
        "sessions",
        sa.Column(
            "suspended",
            sa.Boolean(),
            nullable=False,
            server_default=sa.false(),
            comment="hands over what it holds and gets nothing new",
        ),
    )


def downgrade() -> None:
    """Go back by one."""
    with op.batch_alter_table("sessions") as batch:
        batch.drop_column("suspended")
