"""an accepted copy has a fence, which is above every token that was granted before

Revision: 0009, after 0008
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None

COMMENT = "its broker refuses every token up to this"


def upgrade() -> None:
    """Bring the schema here."""
    fence = sa.Column(
        "fence", sa.BigInteger(), nullable=False, server_default=sa.text("0"), comment=COMMENT
    )
    op.add_column("accepted_folders", fence)


def downgrade() -> None:
    """Go back by one."""
    op.drop_column("accepted_folders", "fence")
