"""rows of what is over say since when, so that they go after a time

Revision: 0032, after 0031
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0032"
down_revision = "0031"
branch_labels = None
depends_on = None

TABLES = {"operations": "see `past.py`", "publications": None, "deletions": None}
"""Table → the comment of its new column."""


def upgrade() -> None:
    """Bring the schema here."""
    for table, comment in TABLES.items():
        op.add_column(table, sa.Column("ended_at", sa.BigInteger(), comment=comment))
        op.create_index(op.f(f"ix_{table}_ended_at"), table, ["ended_at"])


def downgrade() -> None:
    """Go back by one."""
    for table in reversed(TABLES):
        op.drop_index(op.f(f"ix_{table}_ended_at"), table_name=table)
        with op.batch_alter_table(table) as batch:
            batch.drop_column("ended_at")
