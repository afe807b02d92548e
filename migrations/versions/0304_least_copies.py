"""How many data folders must have what is acked.

Revision: 0304
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0304"
down_revision = "0303"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the column."""
    op.add_column(
        "copy_sets",
        sa.Column(
            "least",
            sa.Integer(),
            nullable=False,
            server_default="1",
            comment="number of folders that must have what is acked",
        ),
    )


def downgrade() -> None:
    """Remove the column."""
    op.drop_column("copy_sets", "least")
