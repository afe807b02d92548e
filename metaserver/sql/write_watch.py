"""Monitors whether the database is writable and responsive, based on the results of transactions
and probes.

    a write fails ─▶ not writable, until a probe succeeds
    no write for QUIET_MS, or not writable ─▶ a health check probes, at most once every PROBE_MS

    a transaction is open, and none has ended for SILENT_MS ─▶ silent, until the next one ends

If the database can be read but not written to (full disk, standby), routes are still served, but
leases cannot be renewed.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Concatenate, ParamSpec, TypeVar

from sqlalchemy.engine import Connection

from ...protocol.clock import Clock
from ...protocol.errors import StorageError
from ...rpc.operating.histogram import Histogram
from .database import SqlDatabase, SqliteDatabase
from .dialect import insert_or_replace
from .schema import facts

log = logging.getLogger("keylane.metaserver")
P = ParamSpec("P")
T = TypeVar("T")
QUIET_MS = 5_000
PROBE_MS = 500
PROBE_TIMEOUT_S = 2.0
SILENT_MS = 2_000
"""Time, in milliseconds, after which an unresponsive database counts as silent."""
PROBE_FACT = "written"
DURATION_BOUNDS_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 10)
"""The upper bounds of the durations of transactions: PostgreSQL gives up after 10 s."""


class WatchedDatabase:
    """A database that monitors its transactions. See `Database` for the contract."""

    def __init__(self, database: SqlDatabase, clock: Clock) -> None:
        self._database = database
        self._boot_ms = clock.boot_ms
        self._boot_ns = clock.boot_ns
        self.durations = {kind: Histogram(DURATION_BOUNDS_S) for kind in ("read", "renew", "write")}
        """Maps each kind of transaction to the durations from its call to its result, including the
        wait for a connection.
        """
        self.failures = Counter(dict.fromkeys(self.durations, 0))
        """The number of failed transactions by kind."""
        self._problem = ""
        self._last_write_ms = clock.boot_ms()
        """Time of the last successful write, in milliseconds since boot; opening the database
        counts as a write.
        """
        self._last_probe_ms = 0
        self.open_count = 0
        """Number of transactions that run, or wait for a connection."""
        self._silent_since_ms: int | None = None
        """Time, in milliseconds since boot, since which transactions have been open and none has
        ended; None if none is open.
        """
        self._probe_task: asyncio.Task[None] | None = None

    @property
    def name(self) -> str:
        """The kind of the database: "sqlite" or "postgresql"."""
        return self._database.name

    def on_new_connection(self, call: Callable[[], None]) -> None:
        """Register a callback for new connections to a database server. Not used with SQLite."""
        if not isinstance(self._database, SqliteDatabase):
            self._database.on_new_connection(call)

    async def write(
        self, work: Callable[Concatenate[Connection, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """See `Database.write`."""
        return await self._watch_write("write", self._database.write(work, *args, **kwargs))

    async def write_urgent(
        self, work: Callable[Concatenate[Connection, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """See `Database.write_urgent`."""
        return await self._watch_write("write", self._database.write_urgent(work, *args, **kwargs))

    async def renew(
        self, work: Callable[Concatenate[Connection, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """See `Database.renew`."""
        return await self._watch_write("renew", self._database.renew(work, *args, **kwargs))

    async def read(
        self, work: Callable[Concatenate[Connection, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """See `Database.read`."""
        return await self._watch_response("read", self._database.read(work, *args, **kwargs))

    @property
    def connections(self) -> int:
        """The number of transactions that can run at the same time."""
        return self._database.connections

    async def _watch_response(self, kind: str, transaction: Awaitable[T]) -> T:
        """Await a transaction, and record whether and how fast the database responds."""
        began_ns = self._boot_ns()
        if self._silent_since_ms is None:
            self._silent_since_ms = self._boot_ms()
        self.open_count += 1
        has_failed = False
        try:
            return await transaction
        except StorageError:
            has_failed = True
            self.failures[kind] += 1
            raise
        except asyncio.CancelledError:
            has_failed = True
            raise
        finally:
            self.durations[kind].observe(self._boot_ns() - began_ns)
            self.open_count -= 1
            if not has_failed:
                self._silent_since_ms = self._boot_ms() if self.open_count else None

    def describe_silence(self) -> str:
        """Return a text that says for how long the database has not responded, or ""."""
        if self._silent_since_ms is None:
            return ""
        silent_ms = self._boot_ms() - self._silent_since_ms
        return f"nothing for {silent_ms // 1000} s" if silent_ms >= SILENT_MS else ""

    async def _watch_write(self, kind: str, transaction: Awaitable[T]) -> T:
        """Await a writing transaction and record whether it succeeds."""
        try:
            result = await self._watch_response(kind, transaction)
        except StorageError as error:
            self._report_problem(error.message)
            raise
        # A success does not clear a problem, because many transactions do not change anything.
        self._last_write_ms = self._boot_ms()
        return result

    async def problem(self) -> str:
        """Return the reason why the database cannot be written to, or "". May write a probe to find
        out.
        """
        if isinstance(self._database, SqliteDatabase) and (
            lost_file_problem := self._database.lost_file()
        ):
            self._report_problem(lost_file_problem)
            return self._problem
        now_ms = self._boot_ms()
        is_quiet = now_ms - self._last_write_ms >= QUIET_MS
        if (
            self._probe_task is None
            and (self._problem or is_quiet)
            and now_ms - self._last_probe_ms >= PROBE_MS
        ):
            self._last_probe_ms = now_ms
            self._probe_task = asyncio.create_task(self._write_probe())
        if self._probe_task is not None:
            finished, _ = await asyncio.wait([self._probe_task], timeout=PROBE_TIMEOUT_S)
            if not finished:
                self._report_problem(f"a write has taken more than {PROBE_TIMEOUT_S:g} s")
        return self._problem

    async def _write_probe(self) -> None:
        """Write a fact in order to find out whether the database is writable."""
        try:
            await self._database.write_urgent(_write_fact, str(self._boot_ms()))
        except StorageError as error:
            self._report_problem(error.message)
        else:
            if self._problem:
                log.warning("the database accepts writes again")
            self._problem = ""
            self._last_write_ms = self._boot_ms()
        finally:
            self._probe_task = None

    def _report_problem(self, reason: str) -> None:
        if not self._problem:
            log.warning("cannot write to the database: %s", reason)
        self._problem = reason

    async def close(self) -> None:
        """Cancel the probe. The database itself must be closed by whoever opened it."""
        if self._probe_task is not None:
            self._probe_task.cancel()
            await asyncio.wait([self._probe_task])


def _write_fact(connection: Connection, value: str) -> None:
    insert_or_replace(connection, facts, {"name": PROBE_FACT, "value": value})
