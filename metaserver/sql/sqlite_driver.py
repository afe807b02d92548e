"""Runs transactions on SQLite through aiosqlite, each entirely in the thread of its connection.

    SQLAlchemy's asyncio with aiosqlite      begin ⇄   each statement ⇄ ⇄ ⇄ ⇄   commit ⇄
    this module                              begin, all statements, commit ⇄

Each hop (⇄) waits for another thread, which takes a long time on a busy machine, and a transaction
has a dozen statements. Work may only use its connection and its arguments, because it does not run
in the thread of the event loop.
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
"""Size of the statement caches of SQLAlchemy and SQLite, larger than any connection needs."""
CHUNK_ROWS = 64
"""A required parameter of aiosqlite for iteration, which is not used here."""


class ThreadedConnection(aiosqlite.Connection):
    """An aiosqlite connection whose thread can run arbitrary functions."""

    async def run(self, function: Callable[[], T]) -> T:
        """Call `function` in the connection's thread and return its result. The function continues
        to run if the caller is cancelled.
        """
        result: T = await self._execute(function)  # type: ignore[no-untyped-call]
        return result


class SqliteTransactions:
    """
    Runs transactions on a single connection, one at a time, in the order in which they are
    submitted.

    Args:
        prepare: configures the engine before its first transaction.
    """

    def __init__(self, url: URL, prepare: Callable[[sa.Engine], None]) -> None:
        self._url = url
        self.engine = sa.create_engine(
            url.set(drivername="sqlite"),
            creator=self._get_sqlite,
            poolclass=StaticPool,
            query_cache_size=STATEMENTS_MAX,
        )
        """Used only in the connection's thread; sqlite3 rejects other threads."""
        prepare(self.engine)
        self._connection: ThreadedConnection | None = None
        self._sqlite: sqlite3.Connection | None = None
        self._transaction_connection: Connection | None = None
        """The engine's connection for all transactions; used only in the thread of the SQLite
        connection.
        """
        self._open_lock = asyncio.Lock()
        self._closed = False
        self.pending = 0
        """Number of queued and running transactions."""

    async def run(
        self,
        work: Callable[Concatenate[Connection, P], T],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> T:
        """
        Run `work` in a transaction and return its result. The transaction completes even if the
        caller is cancelled.

        Raises:
            StorageError: the transaction failed.
            Exception: any error of `work`.
        """
        if self._closed:
            raise ending_error()
        self.pending += 1
        try:
            connection = self._connection
            if connection is None:
                # Shielded because a connection would leak if the caller were cancelled at this
                # point.
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
        """Run a transaction. Must be called in the connection's thread."""
        if self._transaction_connection is None:
            self._transaction_connection = self.engine.connect()
        with self._transaction_connection.begin():
            return work(self._transaction_connection, *args, **kwargs)

    async def _open(self) -> ThreadedConnection:
        """Return the connection, opening it on first use."""
        async with self._open_lock:
            if self._closed:
                raise ending_error()
            if self._connection is None:
                connection = ThreadedConnection(self._connect, CHUNK_ROWS)
                # As in SQLAlchemy, an open connection must not keep the process alive.
                connection._thread.daemon = True
                await connection
                self._connection = connection
            return self._connection

    def _connect(self) -> sqlite3.Connection:
        """Open the SQLite connection. Must be called in the connection's thread."""
        self._sqlite = sqlite3.connect(self._url.database or "", cached_statements=STATEMENTS_MAX)
        return self._sqlite

    def _get_sqlite(self) -> Any:
        assert self._sqlite is not None
        return self._sqlite

    def _close_connection(self) -> None:
        """Close the connection for transactions. Must be called in the connection's thread."""
        if self._transaction_connection is not None:
            self._transaction_connection.close()
        self.engine.dispose()

    async def close(self) -> None:
        """Refuse new transactions, wait up to `CLOSE_S` for the running ones, then interrupt them
        and close the connection.
        """
        self._closed = True
        async with self._open_lock:
            connection, self._connection = self._connection, None
            if connection is None:
                return
            release = asyncio.ensure_future(connection.run(self._close_connection))
            finished, _ = await asyncio.wait([release], timeout=CLOSE_S)
            if not finished:
                await connection.interrupt()
                await asyncio.wait([release])
            await connection.close()
