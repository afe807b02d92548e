"""The metaserver's database in memory: SQLite with the metaserver's schema. Transactions run
directly in the event loop.

One connection serves all clusters of a process, one after another, so that SQLAlchemy compiles each
statement only once. A new cluster starts with a copy of the empty database.
"""

from __future__ import annotations

import asyncio
import secrets
import sqlite3
import weakref
from collections.abc import Callable
from functools import cache
from typing import Concatenate, NamedTuple, ParamSpec, TypeVar

import sqlalchemy as sa
from sqlalchemy.engine import Connection
from sqlalchemy.pool import StaticPool

from ...metaserver.sql.cluster_facts import store_cluster_id
from ...metaserver.sql.dialect import prepare_sqlite
from ...metaserver.sql.schema import metadata
from ...protocol.clock import Clock

P = ParamSpec("P")
T = TypeVar("T")
STATEMENTS_MAX = 5_000
"""The maximum number of compiled statements that SQLAlchemy and SQLite keep; more than the
metaserver has.
"""


class CurrentClock:
    """The clock of the current cluster's database machine. The connection outlives clusters."""

    def __init__(self) -> None:
        self.machine: Clock | None = None

    def boot_ms(self) -> int:
        """Return the time since the machine booted, in milliseconds."""
        return 0 if self.machine is None else self.boot_ms_of(self.machine)

    def boot_ms_of(self, machine: Clock) -> int:
        """Return the machine's time since boot in milliseconds. The method is looked up on each
        call, because the connection keeps the bound `boot_ms`.
        """
        return machine.boot_ms()

    def boot_ns(self) -> int:
        """Return the time since the machine booted, in nanoseconds."""
        return self.boot_ms() * 1_000_000

    def wall_ms(self) -> int:
        """Return the time in milliseconds since 1970."""
        return 0 if self.machine is None else self.machine.wall_ms()

    def wall_ns(self) -> int:
        """Return the time in nanoseconds since 1970."""
        return self.wall_ms() * 1_000_000


class SharedConnection(NamedTuple):
    """The shared connection of this process; `empty` is a database with the schema but without
    rows.
    """

    connection: Connection
    raw: sqlite3.Connection
    clock: CurrentClock
    empty: bytes


def memory_engine(clock: Clock) -> tuple[sa.Engine, sqlite3.Connection]:
    """Return an empty in-memory database and its only connection, which is closed together with the
    engine to avoid a warning from SQLite.
    """
    raw = sqlite3.connect(":memory:", check_same_thread=False, cached_statements=STATEMENTS_MAX)
    engine = sa.create_engine(
        "sqlite://",
        creator=lambda: raw,
        poolclass=StaticPool,
        query_cache_size=STATEMENTS_MAX,
    )
    weakref.finalize(engine, raw.close)
    prepare_sqlite(engine, clock)
    return engine, raw


@cache
def shared_connection() -> SharedConnection:
    """Return the shared connection of this process, which is created by the first call."""
    clock = CurrentClock()
    engine, raw = memory_engine(clock)
    with engine.begin() as connection:
        metadata.create_all(connection)
    return SharedConnection(engine.connect(), raw, clock, raw.serialize())


def forget_database() -> None:
    """Drop the shared connection after an interrupted run, because a transaction may still be
    open.
    """
    shared_connection.cache_clear()


class MemoryDatabase:
    """The database of one cluster, which outlives the metaserver's processes. See
    `metaserver.sql.database.Database`.
    """

    name = "memory"

    def __init__(self, machine: Clock) -> None:
        self._connection, raw, clock, empty = shared_connection()
        clock.machine = machine
        raw.deserialize(empty)
        # The operating system draws it, so that two clusters of one seed differ.
        self.transact(store_cluster_id, secrets.token_hex(16))

    def transact(
        self, work: Callable[Concatenate[Connection, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Run a transaction immediately."""
        with self._connection.begin():
            return work(self._connection, *args, **kwargs)

    async def write(
        self, work: Callable[Concatenate[Connection, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """See `Database.write`. Other processes may run before it."""
        await asyncio.sleep(0)
        return self.transact(work, *args, **kwargs)

    write_urgent = renew = read = write

    async def problem(self) -> str:
        """Return why the database is not writable; this is always empty."""
        return ""

    def on_new_connection(self, call: Callable[[], None]) -> None:
        """Do nothing, because an in-memory database opens no connections."""

    def describe_silence(self) -> str:
        """Return how long the database has not replied, which is always 0."""
        return ""
