"""a subject has a limit of one message, which an operation changes

Revision: 0014, after 0013
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0014"
down_revision = "0013"
branch_labels = None
depends_on = None

DEFAULT_BYTES = 1 << 20
"""What every subject had before."""


def upgrade() -> None:
    """Bring the schema here."""
    op.add_column(
        "subjects",
        sa.Column(
            "message_bytes_max",
            sa.Integer(),
            nullable=False,
            server_default=str(DEFAULT_BYTES),
            comment="key, value and properties of one message",
        ),
    )
    op.add_column(
        "operations",
        sa.Column(
            "new_message_bytes_max",
            sa.Integer(),
            comment="of its subject, once the route has changed",
        ),
    )


def downgrade() -> None:
    """Go back by one."""
    with op.batch_alter_table("operations") as batch:
        batch.drop_column("new_message_bytes_max")
    with op.batch_alter_table("subjects") as batch:
        batch.drop_column("message_bytes_max")
