"""The differences between SQLite and PostgreSQL: time, snapshots, inserts with conflicts, and the
set-up of connections.

Invariants
    `now_ms()` is the database's own clock. On PostgreSQL it is `clock_timestamp()`, which advances
    within a transaction. On SQLite it is the machine's boot-time clock, registered on every
    connection: it counts suspend and never jumps.

Divides long lists of ids over several statements.

A statement on PostgreSQL takes 32,767 parameters, on SQLite 32,766. The statements stay in one
transaction, so that all of them or none take effect.
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
"""Longest time, in milliseconds, for which a writer waits for another process on the same SQLite
file.
"""


class now_ms(FunctionElement[int]):  # noqa: N801  a function in SQL
    """The database's time, in milliseconds."""

    type = sa.BigInteger()
    inherit_cache = True
    name = "now_ms"


@compiles(now_ms, "sqlite")
def _sqlite_now(_element: now_ms, _compiler: Any, **_kwargs: Any) -> str:
    return "keylane_now_ms()"


@compiles(now_ms, "postgresql")
def _postgresql_now(_element: now_ms, _compiler: Any, **_kwargs: Any) -> str:
    return "CAST(EXTRACT(EPOCH FROM clock_timestamp()) * 1000 AS BIGINT)"


def begin_snapshot(connection: Connection) -> None:
    """
    Let all statements of a read-only transaction see one snapshot; call it before the first
    statement.

    Without it each statement sees its own snapshot on PostgreSQL; SQLite always has one.
    """
    if connection.dialect.name == "postgresql":
        connection.exec_driver_sql("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")


@dataclass(frozen=True, slots=True)
class SqliteMoment:
    """A mark of the database's state that a connection sees, and its time."""

    commits: tuple[int, int]
    """Counters that equal those of an earlier moment of the same connection only if nobody has
    written since.
    """
    now_ms: int
    """The database's time, in milliseconds."""


def sqlite_moment(connection: Connection) -> SqliteMoment | None:
    """
    Return what this transaction sees; None on PostgreSQL, which cannot report it.

    It asks the driver directly, because SQLAlchemy would take ten times as long.
    """
    if connection.dialect.name != "sqlite":
        return None
    driver = connection.connection.dbapi_connection
    assert driver is not None
    cursor = driver.cursor()
    (others,) = cursor.execute("PRAGMA data_version").fetchone()
    (at_ms,) = cursor.execute("SELECT keylane_now_ms()").fetchone()
    cursor.close()
    return SqliteMoment((others, driver.total_changes), at_ms)


Rows = Mapping[str, Any] | Sequence[Mapping[str, Any]]


def insert_new(connection: Connection, table: sa.Table, rows: Rows) -> int:
    """Insert the rows whose keys do not exist yet. For a single row, return the number of inserted
    rows.
    """
    if not rows:
        return 0
    return connection.execute(_insert_new(connection.dialect.name, table), rows).rowcount


def insert_or_replace(connection: Connection, table: sa.Table, rows: Rows) -> None:
    """Insert whole rows; if the primary key exists, replace all other columns."""
    if rows:
        connection.execute(_insert_or_replace(connection.dialect.name, table), rows)


@cache
def _insert_new(dialect: str, table: sa.Table) -> sa.Insert:
    return _insert(dialect, table).on_conflict_do_nothing()


@cache
def _insert_or_replace(dialect: str, table: sa.Table) -> sa.Insert:
    statement = _insert(dialect, table)
    keys = list(table.primary_key.columns)
    others = {
        column.name: statement.excluded[column.name]
        for column in table.c
        if column not in set(keys)
    }
    return statement.on_conflict_do_update(index_elements=keys, set_=others)


def _insert(dialect: str, table: sa.Table) -> postgresql.Insert | sqlite.Insert:
    if dialect == "sqlite":
        from sqlalchemy.dialects import sqlite

        return sqlite.insert(table)
    from sqlalchemy.dialects import postgresql

    return postgresql.insert(table)


def prepare_sqlite(
    engine: Engine, clock: Clock, *, durable: bool = True, reads: bool = False
) -> None:
    """
    Set up every connection of an SQLite engine.

    Args:
        clock: its boot time is the database's time.
        durable: a commit returns when it is on the disk; otherwise it survives a crash of the
            process, but perhaps not of the machine.
        reads: its transactions only read, and do not wait for writers.
    """
    synchronous = "FULL" if durable else "NORMAL"

    @event.listens_for(engine, "connect")
    def connect(connection: Any, _record: Any) -> None:
        try:
            set_up(connection)
        except BaseException:
            connection.close()  # else its driver's thread, unknown to the pool, would stay
            raise

    def set_up(connection: Any) -> None:
        connection.isolation_level = None  # the driver begins nothing itself; `do_begin` below does
        connection.create_function("keylane_now_ms", 0, clock.boot_ms)
        cursor = connection.cursor()
        for pragma in (
            f"busy_timeout={BUSY_MS}",
            "journal_mode=WAL",
            f"synchronous={synchronous}",
            "foreign_keys=ON",
        ):
            cursor.execute(f"PRAGMA {pragma}")
        cursor.close()

    # A deferred transaction that turns into a writer may fail half-way; an immediate one waits.
    begin = "BEGIN" if reads else "BEGIN IMMEDIATE"

    def do_begin(dbapi_connection: PoolProxiedConnection) -> None:
        cursor = dbapi_connection.cursor()
        cursor.execute(begin)
        cursor.close()

    # Not a listener for "begin", because an engine that has one looks for listeners at every
    # statement. The dialect belongs to this engine alone.
    engine.dialect.do_begin = do_begin  # type: ignore[method-assign]


Id = TypeVar("Id", int, str)

IDS_AT_ONCE = 5_000
"""Most ids in one statement."""


def portions(ids: Collection[Id]) -> Iterator[list[Id]]:
    """Yield the ids without duplicates, at most `IDS_AT_ONCE` at a time, ascending so that rows are
    locked in one order.
    """
    ordered = sorted(set(ids))
    for first in range(0, len(ordered), IDS_AT_ONCE):
        yield ordered[first : first + IDS_AT_ONCE]


def rows_of(connection: Connection, select: Executable, ids: Collection[Id]) -> Iterator[Row[Any]]:
    """Yield the rows of a SELECT with a parameter `ids`, which gets the ids in `portions`."""
    for some in portions(ids):
        yield from connection.execute(select, {"ids": some})
