"""The operations that users write into their own Alembic migrations, for each kind of tables that
we keep for them.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import sqlalchemy as sa
from alembic.migration import MigrationContext
from alembic.operations import Operations


@contextmanager
def migrating(path: Path) -> Iterator[tuple[Operations, sa.Connection]]:
    """Operations on a new SQLite database, and its connection; it has no table at the end."""
    engine = sa.create_engine(f"sqlite:///{path}")
    with engine.begin() as connection:
        yield Operations(MigrationContext.configure(connection)), connection
        assert sa.inspect(connection).get_table_names() == []
    engine.dispose()


def written_as_sql(dialect: str, migrate: Callable[[Operations], None]) -> str:
    """The statements that a migration would run."""
    written = io.StringIO()
    options = {"as_sql": True, "output_buffer": written}
    migrate(Operations(MigrationContext.configure(dialect_name=dialect, opts=options)))
    return written.getvalue()
