"""settings of a subject are changed by an operation

Revision: 0013, after 0012
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0013"
down_revision = "0012"
branch_labels = None
depends_on = None

COLUMNS = ("new_order_strategy", "new_retention")
COMMENT = "of its subject, once the route has changed"


def upgrade() -> None:
    """Bring the schema here."""
    for name in COLUMNS:
        op.add_column("operations", sa.Column(name, sa.String(length=16), comment=COMMENT))


def downgrade() -> None:
    """Go back by one."""
    with op.batch_alter_table("operations") as batch:
        for name in COLUMNS:
            batch.drop_column(name)
