"""late joins of processes that are gone neither hold an instance's place nor take it back

Revision: 0022, after 0018
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0022"
down_revision = "0019"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Bring the schema here."""
    op.add_column(
        "sessions",
        sa.Column(
            "heard",
            sa.Boolean(),
            nullable=False,
            server_default=sa.false(),
            comment="a heartbeat came: the join is no late call of a process that is gone",
        ),
    )
    op.add_column(
        "sessions",
        sa.Column(
            "predecessors",
            sa.String(2_048),
            nullable=False,
            server_default="",
            comment="the last sessions of its instance: late calls of theirs do not begin them again",
        ),
    )


def downgrade() -> None:
    """Go back by one."""
    with op.batch_alter_table("sessions") as batch:
        batch.drop_column("predecessors")
        batch.drop_column("heard")
