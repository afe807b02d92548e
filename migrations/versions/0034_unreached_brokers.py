"""sessions say to which broker groups they get no connection

Revision: 0034, after 0033
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0034"
down_revision = "0033"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Bring the schema here."""
    op.add_column(
        "sessions",
        sa.Column(
            "unreached",
            sa.String(4_096),
            nullable=False,
            server_default="",
            comment="names of broker groups to which it gets no connection, with spaces between",
        ),
    )


def downgrade() -> None:
    """Go back by one."""
    with op.batch_alter_table("sessions") as batch:
        batch.drop_column("unreached")
