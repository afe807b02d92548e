"""Times at which partitions were opened.

Revision: 0301
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0301"
down_revision = "0300"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the column."""
    comment = "calendar of the database, ms; none: not known"
    op.add_column(
        "partitions", sa.Column("opened_at", sa.BigInteger(), nullable=True, comment=comment)
    )


def downgrade() -> None:
    """Remove the column."""
    op.drop_column("partitions", "opened_at")
