"""rows of a partition, and names of what was deleted, are found without reading whole tables

A partition that is deleted is looked for in every table that refers to it.

Revision: 0030, after 0029
"""

from __future__ import annotations

from alembic import op

revision = "0030"
down_revision = "0029"
branch_labels = None
depends_on = None

INDEXES = (
    ("partition_parents", ("parent_id",)),
    ("steps", ("partition_id",)),
    ("leases", ("partition_id",)),
    ("drained", ("partition_id",)),
    ("heard", ("partition_id",)),
    ("starts", ("partition_id",)),
    ("deletions", ("subject", "group_id")),
)
"""Table, and the columns of its new index."""


def _name(table: str, columns: tuple[str, ...]) -> str:
    return f"ix_{table}_{'_'.join(columns)}"


def upgrade() -> None:
    """Bring the schema here."""
    for table, columns in INDEXES:
        op.create_index(op.f(_name(table, columns)), table, list(columns))


def downgrade() -> None:
    """Go back by one."""
    for table, columns in reversed(INDEXES):
        op.drop_index(op.f(_name(table, columns)), table_name=table)
