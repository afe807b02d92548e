"""Times since when operations wait.

Revision: 0302
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0302"
down_revision = "0301"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the column."""
    comment = "calendar of the database, ms; none: does not wait"
    op.add_column(
        "operations", sa.Column("waiting_since", sa.BigInteger(), nullable=True, comment=comment)
    )


def downgrade() -> None:
    """Remove the column."""
    op.drop_column("operations", "waiting_since")
