"""a session may be of a named instance of its group, which a restarted client continues

Revision: 0018, after 0015
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0018"
down_revision = "0017"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Bring the schema here."""
    op.add_column(
        "sessions",
        sa.Column(
            "instance",
            sa.String(200),
            nullable=False,
            server_default="",
            comment="the name under which a restarted client takes its place; empty: none",
        ),
    )


def downgrade() -> None:
    """Go back by one."""
    with op.batch_alter_table("sessions") as batch:
        batch.drop_column("instance")
