"""SQLite whose transactions each run whole in a thread: one hop there and back, however many statements they have.

A hop waits for a thread on a busy machine, and a transaction has a dozen statements; joins and hand-overs wait for them.

    async driver     begin ⇄   statement ⇄   statement ⇄   …   commit ⇄
    here             begin, statements, commit ⇄

Work may therefore run at the same time as the event loop: it uses its connection and its arguments, and no state of a
service.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

import sqlalchemy as sa
from sqlalchemy.engine import URL, Connection
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.pool import QueuePool

from ...protocol.clock import Clock
from .dialect import prepare_sqlite
from .transactions import storage_error

T = TypeVar("T")


class SqliteThreads:
    """
    An SQLite file with one connection for each of its threads, which are made when they are first needed.

    Args:
        url: of the file, with any driver.
        clock, durable, reads: see `prepare_sqlite`.
        threads: transactions that run at once.
    """

    def __init__(
        self, url: URL, clock: Clock, *, threads: int = 1, durable: bool = True, reads: bool = False
    ) -> None:
        self._engine = sa.create_engine(
            url.set(drivername="sqlite"),
            # A connection is used by one thread at a time, which may be another one each time.
            creator=partial(sqlite3.connect, url.database or "", check_same_thread=False),
            poolclass=QueuePool,
            pool_size=threads,
            max_overflow=0,
        )
        prepare_sqlite(self._engine, clock, durable=durable, reads=reads)
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="sqlite")

    async def run(self, work: Callable[[Connection], T]) -> T:
        """
        Return what `work` returns, in a transaction of its own.

        Raises:
            What `work` raises, and StorageError.
        """
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._run, work)

    def _run(self, work: Callable[[Connection], T]) -> T:
        try:
            with self._engine.begin() as connection:
                return work(connection)
        except (SQLAlchemyError, OSError) as error:
            raise storage_error(error, self._engine) from error

    async def close(self) -> None:
        """Wait for the transactions that run, and close every connection."""
        await asyncio.to_thread(self._threads.shutdown)
        self._engine.dispose()
