"""SQLite through aiosqlite, one transaction at a time, which runs entirely in the thread that
aiosqlite has for its connection.

    aiosqlite under SQLAlchemy's asyncio     begin ⇄   each statement ⇄ ⇄ ⇄ ⇄   commit ⇄
    here                                     begin, all statements, commit ⇄

Each hop waits for a thread on a busy machine, and a transaction has a dozen statements; the event
loop does other work meanwhile. Work gets a connection and values, and touches nothing else, because
it runs beside the event loop.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable
from functools import partial
from typing import Any, Concatenate, ParamSpec, TypeVar

import aiosqlite
import sqlalchemy as sa
from sqlalchemy.engine import URL, Connection
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.pool import StaticPool

from ...rpc.race import shield
from .transactions import CLOSE_S, ending_error, storage_error

P = ParamSpec("P")
T = TypeVar("T")
STATEMENTS_MAX = 1_000
"""Number of compiled statements that SQLAlchemy and SQLite keep for a connection; no connection
uses so many.
"""
CHUNK_ROWS = 64
"""A parameter of aiosqlite for iteration, which is not used here."""


class ThreadedConnection(aiosqlite.Connection):
    """A connection of aiosqlite whose thread can also run whole functions."""

    async def run(self, function: Callable[[], T]) -> T:
        """Call `function` in the connection's thread, and return its result; it is not cancelled
        with its caller.
        """
        answer: T = await self._execute(function)  # type: ignore[no-untyped-call]
        return answer


class SqliteTransactions:
    """
    Runs transactions on one connection, one after the other, in the order of the calls.

    Args:
        prepare: sets up the engine before its first transaction.
    """

    def __init__(self, url: URL, prepare: Callable[[sa.Engine], None]) -> None:
        self._url = url
        self.engine = sa.create_engine(
            url.set(drivername="sqlite"),
            creator=self._raw,
            poolclass=StaticPool,
            query_cache_size=STATEMENTS_MAX,
        )
        """The engine, used only in the connection's thread; sqlite3 refuses another one."""
        prepare(self.engine)
        self._connection: ThreadedConnection | None = None
        self._sqlite: sqlite3.Connection | None = None
        self._kept: Connection | None = None
        """The engine's connection for all transactions, made and used in the connection's
        thread.
        """
        self._opening = asyncio.Lock()
        self._closed = False
        self.pending = 0
        """Number of transactions that have not ended."""

    async def run(
        self,
        work: Callable[Concatenate[Connection, P], T],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> T:
        """
        Run `work` in a transaction, and return its result. If the caller is cancelled, the
        transaction still ends.

        Raises:
            Any error of `work`, and StorageError.
        """
        if self._closed:
            raise ending_error()
        self.pending += 1
        try:
            connection = self._connection
            if connection is None:
                # A caller that left now would leave a connection behind that nobody closes.
                connection = await shield(self._open())
            return await connection.run(partial(self._transact, work, *args, **kwargs))
        except (SQLAlchemyError, sqlite3.Error, OSError) as error:
            raise storage_error(error, self._url) from error
        finally:
            self.pending -= 1

    def _transact(
        self,
        work: Callable[Concatenate[Connection, P], T],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> T:
        """Run a transaction; called in the connection's thread."""
        if self._kept is None:
            self._kept = self.engine.connect()
        with self._kept.begin():
            return work(self._kept, *args, **kwargs)

    async def _open(self) -> ThreadedConnection:
        async with self._opening:
            if self._closed:
                raise ending_error()
            if self._connection is None:
                opened = ThreadedConnection(self._connect, CHUNK_ROWS)
                # As in SQLAlchemy, an open connection does not keep the process alive.
                opened._thread.daemon = True
                await opened
                self._connection = opened
            return self._connection

    def _connect(self) -> sqlite3.Connection:
        """Connect; called in the connection's thread. SQLite caches its own form of each
        statement.
        """
        self._sqlite = sqlite3.connect(self._url.database or "", cached_statements=STATEMENTS_MAX)
        return self._sqlite

    def _raw(self) -> Any:
        assert self._sqlite is not None
        return self._sqlite

    def _end(self) -> None:
        """Release the connection; called in the connection's thread."""
        if self._kept is not None:
            self._kept.close()
        self.engine.dispose()

    async def close(self) -> None:
        """Refuse new transactions, wait for the running ones, interrupt them if they take long, and
        close the connection.
        """
        self._closed = True
        async with self._opening:
            connection, self._connection = self._connection, None
            if connection is None:
                return
            ending = asyncio.ensure_future(connection.run(self._end))
            done, _ = await asyncio.wait([ending], timeout=CLOSE_S)
            if not done:
                await connection.interrupt()
                await asyncio.wait([ending])
            await connection.close()
