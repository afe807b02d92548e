"""Why the copies that acks wait for may be other ones.

Revision: 0306
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0306"
down_revision = "0305"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the column."""
    op.add_column(
        "copy_sets",
        sa.Column(
            "quarantine",
            sa.String(512),
            nullable=False,
            server_default="",
            comment="why the set may be an older one",
        ),
    )


def downgrade() -> None:
    """Remove the column."""
    op.drop_column("copy_sets", "quarantine")
