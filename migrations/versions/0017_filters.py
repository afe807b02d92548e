"""what a consumer leaves out is known, so that members of one group cannot differ

Revision: 0017, after 0015
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0017"
down_revision = "0015"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Bring the schema here."""
    op.add_column(
        "sessions",
        sa.Column(
            "filter",
            sa.String(length=512),
            nullable=False,
            server_default="",
            comment="what the consumer leaves out; the same for all sessions of a group",
        ),
    )


def downgrade() -> None:
    """Go back by one."""
    with op.batch_alter_table("sessions") as batch:
        batch.drop_column("filter")
