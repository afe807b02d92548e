"""aiosqlite with fewer hops: a statement crosses to the connection's thread and back once, not four times.

Each hop waits for a thread on a busy machine, and a transaction has a dozen statements; hand-overs wait for them.

    aiosqlite     make cursor ⇄   execute ⇄   fetch all ⇄   close ⇄
    here          execute and fetch all ⇄
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable
from functools import partial
from typing import Any, Self

import aiosqlite

CHUNK_ROWS = 64
"""A parameter of aiosqlite for iteration, which is not used here."""


class _Cursor(aiosqlite.Cursor):
    """A cursor that fetches all rows with the execution; it is made and closed without a hop."""

    _rows: list[Any]

    async def __aenter__(self) -> Self:
        return self

    async def execute(self, sql: str, parameters: Iterable[Any] | None = None) -> Self:
        self._rows = await self._execute(self._run, sql, parameters or ())  # type: ignore[no-untyped-call]
        return self

    def _run(self, sql: str, parameters: Iterable[Any]) -> list[Any]:
        cursor = self._cursor.execute(sql, parameters)  # type: ignore[arg-type]
        return [] if cursor.description is None else cursor.fetchall()

    async def fetchall(self) -> list[Any]:
        rows, self._rows = self._rows, []
        return rows

    async def close(self) -> None:
        self._cursor.close()


class FewHopsConnection(aiosqlite.Connection):
    """A connection for SQLAlchemy, which uses cursors in one way only: execute, fetch all, close."""

    def cursor(self) -> _Cursor:  # type: ignore[override]  # aiosqlite's is awaited or entered, this one entered
        """Make a cursor; enter it before use."""
        return _Cursor(self, self._conn.cursor())

    async def rollback(self) -> None:
        """Roll back the transaction, if there is one; the pool calls this for every returned connection."""
        if self._conn.in_transaction:
            await super().rollback()


async def open_connection(database: str) -> FewHopsConnection:
    """Open an SQLite file, for `create_async_engine(async_creator=…)`."""
    # Used by one thread at a time: the connection's own, or the event loop while that one is idle.
    connector = partial(sqlite3.connect, database, check_same_thread=False)
    connection = FewHopsConnection(connector, CHUNK_ROWS)
    connection._thread.daemon = (
        True  # as in SQLAlchemy: an open connection does not keep the process alive
    )
    await connection
    return connection
