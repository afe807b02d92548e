"""Copies to which brokers hand over.

Revision: 0303
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0303"
down_revision = "0302"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the columns."""
    comment = "copy that may take the place now"
    op.add_column(
        "copy_sets", sa.Column("handing_to", sa.String(64), nullable=True, comment=comment)
    )
    op.add_column(
        "copy_sets",
        sa.Column(
            "handing_until", sa.BigInteger(), nullable=True, comment="time of the database, ms"
        ),
    )


def downgrade() -> None:
    """Remove the columns."""
    op.drop_column("copy_sets", "handing_until")
    op.drop_column("copy_sets", "handing_to")
