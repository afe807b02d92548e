"""rows of a partition, and names of what was deleted, are found without reading whole tables

A partition that is deleted is looked for in every table that refers to it.

On PostgreSQL the transaction keeps writers of these tables waiting until its end.  Where tables are large, an operator makes
the indexes before, with CREATE INDEX CONCURRENTLY; what is there is left, and what was interrupted is made again.

Revision: 0030, after 0029
"""

from __future__ import annotations

import sqlalchemy as sa
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


def _half_made() -> set[str]:
    """The names of indexes that an interrupted CREATE INDEX CONCURRENTLY has left; no query uses them."""
    connection = op.get_bind()
    if connection.dialect.name != "postgresql":
        return set()
    query = """
        SELECT relname FROM pg_index JOIN pg_class ON pg_class.oid = indexrelid
        WHERE NOT indisvalid AND relnamespace = current_schema()::regnamespace
    """
    return set(connection.execute(sa.text(query)).scalars())


def upgrade() -> None:
    """Bring the schema here."""
    half_made = _half_made()
    for table, columns in INDEXES:
        name = op.f(_name(table, columns))
        if name in half_made:
            op.drop_index(name, table_name=table)
        op.create_index(name, table, list(columns), if_not_exists=True)


def downgrade() -> None:
    """Go back by one."""
    for table, columns in reversed(INDEXES):
        op.drop_index(op.f(_name(table, columns)), table_name=table)
