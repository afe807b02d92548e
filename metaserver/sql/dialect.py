"""Hides the differences between SQLite and PostgreSQL: clocks, snapshots, upserts, connection
setup, and limits on the number of parameters.

Invariants
    `now_ms()` is the database's own clock. In PostgreSQL it is `clock_timestamp()`, which advances
    within a transaction. In SQLite it is the machine's boot-time clock, registered on every
    connection; it includes time spent suspended and never jumps.
    A long list of ids is divided among several statements in one transaction, because PostgreSQL
    allows 32,767 parameters in a statement, and SQLite 32,766.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar

import sqlalchemy as sa
from sqlalchemy import Executable, Row, event
from sqlalchemy.engine import Connection, Engine
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.pool import PoolProxiedConnection
from sqlalchemy.sql.functions import FunctionElement

from ...protocol.clock import Clock

if TYPE_CHECKING:
    from sqlalchemy.dialects import postgresql, sqlite


BUSY_MS = 5_000
"""Maximum time, in milliseconds, that a writer waits for another process that uses the same SQLite
file.
"""


class now_ms(FunctionElement[int]):  # noqa: N801  a function in SQL
    """The database's time in milliseconds, as an SQL function."""

    type = sa.BigInteger()
    inherit_cache = True
    name = "now_ms"


@compiles(now_ms, "sqlite")
def _sqlite_now(_element: now_ms, _compiler: Any, **_kwargs: Any) -> str:
    return "keylane_now_ms()"


@compiles(now_ms, "postgresql")
def _postgresql_now(_element: now_ms, _compiler: Any, **_kwargs: Any) -> str:
    return "CAST(EXTRACT(EPOCH FROM clock_timestamp()) * 1000 AS BIGINT)"


class calendar_ms(now_ms):  # noqa: N801  a function in SQL
    """The calendar's time in milliseconds since 1970, as an SQL function. It may jump, and is only
    shown to people. In PostgreSQL it is `now_ms`.
    """

    inherit_cache = True
    name = "calendar_ms"


@compiles(calendar_ms, "sqlite")
def _sqlite_calendar(_element: calendar_ms, _compiler: Any, **_kwargs: Any) -> str:
    return "keylane_calendar_ms()"


def read_calendar_ms(connection: Connection) -> int:
    """Return the calendar's time at the database."""
    time_ms: int = connection.execute(_calendar_query).scalar_one()
    return time_ms


_calendar_query = sa.select(calendar_ms())


def begin_snapshot(connection: Connection) -> None:
    """
    Make all statements of a read-only transaction see the same snapshot. Must be called before the
    first statement.

    Otherwise each statement sees a new snapshot in PostgreSQL; in SQLite, a transaction always has
    a single snapshot.
    """
    if connection.dialect.name == "postgresql":
        connection.exec_driver_sql("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")


@dataclass(frozen=True, slots=True)
class SqliteVersion:
    """A version of the database as seen by one connection, and the time at which it was read."""

    commits: tuple[int, int]
    """Counters that equal those of an earlier version on the same connection only if nothing has
    been written since.
    """
    now_ms: int
    """The database's time in milliseconds."""


def read_sqlite_version(connection: Connection) -> SqliteVersion | None:
    """
    Return the version of the database that this transaction sees; None with PostgreSQL.

    This bypasses SQLAlchemy, which would take ten times as long.
    """
    if connection.dialect.name != "sqlite":
        return None
    dbapi_connection = connection.connection.dbapi_connection
    assert dbapi_connection is not None
    cursor = dbapi_connection.cursor()
    (data_version,) = cursor.execute("PRAGMA data_version").fetchone()
    (time_ms,) = cursor.execute("SELECT keylane_now_ms()").fetchone()
    cursor.close()
    return SqliteVersion((data_version, dbapi_connection.total_changes), time_ms)


Rows = Mapping[str, Any] | Sequence[Mapping[str, Any]]


def insert_new(connection: Connection, table: sa.Table, rows: Rows) -> int:
    """Insert those rows whose keys do not exist yet. For a single row, return 1 if it was inserted,
    else 0.
    """
    if not rows:
        return 0
    return connection.execute(_build_insert_new(connection.dialect.name, table), rows).rowcount


def insert_or_replace(connection: Connection, table: sa.Table, rows: Rows) -> None:
    """Insert complete rows. If the primary key of a row exists, all of its other columns are
    replaced.
    """
    if rows:
        connection.execute(_build_upsert(connection.dialect.name, table), rows)


@cache
def _build_insert_new(dialect: str, table: sa.Table) -> sa.Insert:
    return _build_insert(dialect, table).on_conflict_do_nothing()


@cache
def _build_upsert(dialect: str, table: sa.Table) -> sa.Insert:
    statement = _build_insert(dialect, table)
    keys = list(table.primary_key.columns)
    updates = {
        column.name: statement.excluded[column.name]
        for column in table.c
        if column not in set(keys)
    }
    return statement.on_conflict_do_update(index_elements=keys, set_=updates)


def _build_insert(dialect: str, table: sa.Table) -> postgresql.Insert | sqlite.Insert:
    if dialect == "sqlite":
        from sqlalchemy.dialects import sqlite

        return sqlite.insert(table)
    from sqlalchemy.dialects import postgresql

    return postgresql.insert(table)


def prepare_sqlite(
    engine: Engine, clock: Clock, *, durable: bool = True, read_only: bool = False
) -> None:
    """
    Set up every connection of an SQLite engine.

    Args:
        clock: its boot time becomes the database's time.
        durable: a commit returns only when it is on disk; otherwise it survives a crash of the
            process, but possibly not of the machine.
        read_only: transactions only read and do not wait for writers.
    """
    synchronous = "FULL" if durable else "NORMAL"

    @event.listens_for(engine, "connect")
    def connect(connection: Any, _record: Any) -> None:
        try:
            configure(connection)
        except BaseException:
            connection.close()  # otherwise the driver's thread would leak, unknown to the pool
            raise

    def configure(connection: Any) -> None:
        connection.isolation_level = None  # transactions begin in `do_begin`, not in the driver
        connection.create_function("keylane_now_ms", 0, clock.boot_ms)
        connection.create_function("keylane_calendar_ms", 0, clock.wall_ms)
        cursor = connection.cursor()
        for pragma in (
            f"busy_timeout={BUSY_MS}",
            "journal_mode=WAL",
            f"synchronous={synchronous}",
            "foreign_keys=ON",
        ):
            cursor.execute(f"PRAGMA {pragma}")
        cursor.close()

    # A deferred transaction may fail when it begins to write, whereas an immediate one waits at its
    # start.
    begin = "BEGIN" if read_only else "BEGIN IMMEDIATE"

    def do_begin(dbapi_connection: PoolProxiedConnection) -> None:
        cursor = dbapi_connection.cursor()
        cursor.execute(begin)
        cursor.close()

    # This is not a listener for "begin", which would slow down every statement of the engine. The
    # dialect is not shared with other engines.
    engine.dialect.do_begin = do_begin  # type: ignore[method-assign]


def skip_ids(connection: Connection, table: sa.Table, highest_id: int) -> None:
    """Make the database assign only ids above `highest_id` to new rows of a table."""
    (column,) = table.primary_key.columns
    if connection.dialect.name == "postgresql":
        sequence = sa.func.pg_get_serial_sequence(table.name, column.name)
        connection.execute(sa.select(sa.func.setval(sequence, highest_id)))
        return
    # SQLite stores the highest id it has ever assigned in a special table.
    sequences = sa.table("sqlite_sequence", sa.column("name"), sa.column("seq"))
    is_of_table = sequences.c.name == table.name
    assigned_id = connection.execute(sa.select(sequences.c.seq).where(is_of_table)).scalar() or 0
    connection.execute(sa.delete(sequences).where(is_of_table))
    row = {"name": table.name, "seq": max(highest_id, assigned_id)}
    connection.execute(sa.insert(sequences).values(row))


Id = TypeVar("Id", int, str)

IDS_PER_STATEMENT = 5_000
"""Maximum number of ids in one statement."""


def split_ids(ids: Collection[Id]) -> Iterator[list[Id]]:
    """Yield the distinct ids in ascending chunks of at most `IDS_PER_STATEMENT`, so that rows are
    always locked in the same order.
    """
    sorted_ids = sorted(set(ids))
    for start in range(0, len(sorted_ids), IDS_PER_STATEMENT):
        yield sorted_ids[start : start + IDS_PER_STATEMENT]


def read_in_chunks(
    connection: Connection, query: Executable, ids: Collection[Id]
) -> Iterator[Row[Any]]:
    """Yield the rows of a query that has a parameter `ids` and is executed once per chunk of
    ids.
    """
    for chunk in split_ids(ids):
        yield from connection.execute(query, {"ids": chunk})
