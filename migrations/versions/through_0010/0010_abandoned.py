"""the column of abandoned partitions is named as the rest of the system names them

Revision: 0010, after 0009
"""

from __future__ import annotations

from alembic import op

revision = "0010"
down_revision = "0009"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Bring the schema here."""
    op.alter_column("partitions", "forsaken", new_column_name="abandoned")


def downgrade() -> None:
    """Go back by one."""
    op.alter_column("partitions", "abandoned", new_column_name="forsaken")
