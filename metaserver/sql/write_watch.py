"""Watches whether the database can be written, by the results of writes and of small probes.

    a write fails ─▶ not writable, until a probe succeeds
    no write for QUIET_MS, or not writable ─▶ a health check probes, at most once each PROBE_MS

    asked, and no answer since SILENT_MS ─▶ silent, until the next answer

A database that can be read but not written (a full disk, a standby) answers routes, but renews no
lease.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Concatenate, ParamSpec, TypeVar

from sqlalchemy.engine import Connection

from ...protocol.clock import Clock
from ...protocol.errors import StorageError
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
"""Time, in milliseconds, after which a database that was asked and has not answered counts as
silent.
"""
FACT = "written"


class WatchedDatabase:
    """A database that records whether its writes succeed. See `Database` for the contract."""

    def __init__(self, database: SqlDatabase, clock: Clock) -> None:
        self._database = database
        self._boot_ms = clock.boot_ms
        self._problem = ""
        self._written_ms = clock.boot_ms()
        """Boot time of the last successful write, in milliseconds; opening the database counts as
        one.
        """
        self._probed_ms = 0
        self._asked = 0
        """Number of transactions that have not ended."""
        self._unanswered_ms: int | None = None
        """Boot time, in milliseconds, since when the database was asked and has not answered; None:
        it has answered everything.
        """
        self._probe: asyncio.Task[None] | None = None

    @property
    def name(self) -> str:
        """The kind of the database: "sqlite" or "postgresql"."""
        return self._database.name

    def on_new_connection(self, call: Callable[[], None]) -> None:
        """Register a callback for each new connection to a server; SQLite has none."""
        if not isinstance(self._database, SqliteDatabase):
            self._database.on_new_connection(call)

    async def write(
        self, work: Callable[Concatenate[Connection, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """See `Database.write`."""
        return await self._watched(self._database.write(work, *args, **kwargs))

    async def write_first(
        self, work: Callable[Concatenate[Connection, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """See `Database.write_first`."""
        return await self._watched(self._database.write_first(work, *args, **kwargs))

    async def renew(
        self, work: Callable[Concatenate[Connection, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """See `Database.renew`."""
        return await self._watched(self._database.renew(work, *args, **kwargs))

    async def read(
        self, work: Callable[Concatenate[Connection, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """See `Database.read`."""
        return await self._answered(self._database.read(work, *args, **kwargs))

    async def _answered(self, asked: Awaitable[T]) -> T:
        """Await an answer, and record whether the database answers."""
        if self._unanswered_ms is None:
            self._unanswered_ms = self._boot_ms()
        self._asked += 1
        silent = False
        try:
            return await asked
        except (StorageError, asyncio.CancelledError):
            silent = True
            raise
        finally:
            self._asked -= 1
            if not silent:
                self._unanswered_ms = self._boot_ms() if self._asked else None

    def silence(self) -> str:
        """Return for how long the database has not answered, as a text, or ""."""
        if self._unanswered_ms is None:
            return ""
        silent_ms = self._boot_ms() - self._unanswered_ms
        return f"nothing for {silent_ms // 1000} s" if silent_ms >= SILENT_MS else ""

    async def _watched(self, written: Awaitable[T]) -> T:
        try:
            answer = await self._answered(written)
        except StorageError as error:
            self._failed(error.message)
            raise
        # No proof that a problem is over: many works change nothing.
        self._written_ms = self._boot_ms()
        return answer

    async def problem(self) -> str:
        """Return the reason why the database cannot be written now, or ""; may write to
        find out.
        """
        if isinstance(self._database, SqliteDatabase) and (lost := self._database.lost_file()):
            self._failed(lost)
            return self._problem
        now_ms = self._boot_ms()
        quiet = now_ms - self._written_ms >= QUIET_MS
        if (
            self._probe is None
            and (self._problem or quiet)
            and now_ms - self._probed_ms >= PROBE_MS
        ):
            self._probed_ms = now_ms
            self._probe = asyncio.create_task(self._write_probe())
        if self._probe is not None:
            done, _ = await asyncio.wait([self._probe], timeout=PROBE_TIMEOUT_S)
            if not done:
                self._failed(f"a write has taken more than {PROBE_TIMEOUT_S:g} s")
        return self._problem

    async def _write_probe(self) -> None:
        try:
            await self._database.write_first(_write_fact, str(self._boot_ms()))
        except StorageError as error:
            self._failed(error.message)
        else:
            if self._problem:
                log.warning("the database accepts writes again")
            self._problem = ""
            self._written_ms = self._boot_ms()
        finally:
            self._probe = None

    def _failed(self, why: str) -> None:
        if not self._problem:
            log.warning("cannot write to the database: %s", why)
        self._problem = why

    async def close(self) -> None:
        """Cancel the probe; the database is closed by its opener."""
        if self._probe is not None:
            self._probe.cancel()
            await asyncio.wait([self._probe])


def _write_fact(connection: Connection, value: str) -> None:
    insert_or_replace(connection, facts, {"name": FACT, "value": value})
