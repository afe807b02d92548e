"""Whether copies of a broker group on one machine may count.

Revision: 0305
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0305"
down_revision = "0304"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the column."""
    column: sa.Column[bool] = sa.Column(
        "may_share_machine",
        sa.Boolean(),
        nullable=False,
        server_default=sa.false(),
        comment="copies on one machine may count",
    )
    op.add_column("copy_sets", column)


def downgrade() -> None:
    """Remove the column."""
    op.drop_column("copy_sets", "may_share_machine")
