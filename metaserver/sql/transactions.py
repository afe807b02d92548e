"""Runs transactions: they are repeated if the database asks for it, and writing ones end even if
their callers are gone. I/O: SQL.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from sqlalchemy.engine import URL, Connection
from sqlalchemy.exc import DBAPIError, SQLAlchemyError

from ...protocol.errors import DataFolderError, DiskFullError, Fate, StorageError
from ...protocol.errors.failures import open_files_error
from ...protocol.text import without_password
from ...rpc.race import shield
from .open_files import few_files_left

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

T = TypeVar("T")
TRIES = 3
CLOSE_S = 2.0
GONE_S = 0.5
"""Longest time, in seconds, that a read may take after its caller is gone; a connection that is
given up in the middle has to be made again.
"""
_RETRY_STATES = {"40001", "40P01"}  # serialization failure, deadlock: PostgreSQL asks to try again
READ_ONLY = "25006"
"""SQLSTATE of PostgreSQL on a standby, or with its default_transaction_read_only."""


class TransactionRunner:
    """
    Runs transactions on asyncio engines.

    A transaction whose caller is gone continues, because its connection would be lost with it; one
    that only reads is cancelled after `GONE_S`. Its error is dropped, because nobody is left to
    raise it.

    `close` waits for the transactions whose callers are gone, so that every connection is closed.
    """

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()
        self._closed = False

    async def run(
        self,
        engine: AsyncEngine,
        work: Callable[[Connection], T],
        *,
        reads: bool = False,
    ) -> T:
        """
        Run `work` in a transaction of its own, and return its result. Raises its errors, and
        StorageError.

        Args:
            reads: `work` changes nothing.
        """
        if self._closed:
            raise ending_error()
        task = asyncio.create_task(run_transaction(engine, work))
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        try:
            return await shield(task)
        except asyncio.CancelledError:
            if reads and not task.done():
                taking = asyncio.get_running_loop().call_later(GONE_S, task.cancel)
                task.add_done_callback(lambda _done: taking.cancel())
            raise

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # its caller raises it, unless the caller is gone

    async def close(self) -> None:
        """Refuse new transactions, wait `CLOSE_S` for the running ones, then cancel them."""
        self._closed = True
        if not self._tasks:
            return
        _, late = await asyncio.wait(self._tasks, timeout=CLOSE_S)
        for task in late:
            task.cancel()
        if late:
            await asyncio.wait(late)


async def run_transaction(engine: AsyncEngine, work: Callable[[Connection], T]) -> T:
    """
    Run `work` in a transaction of its own, and return its result; it is tried up to `TRIES` times
    if the database asks for it.

    Raises:
        Any error of `work`.
        StorageError: nothing was changed; or, with fate UNKNOWN, the connection broke during the
            commit.
    """
    for left in reversed(range(TRIES)):
        committing = False
        try:
            async with engine.connect() as connection:
                try:
                    async with connection.begin() as transaction:
                        done = await connection.run_sync(work)
                        committing = True
                        await transaction.commit()
                        return done
                except asyncio.CancelledError:
                    await _give_back(connection)
                    raise
        except DBAPIError as error:
            if not left or getattr(error.orig, "sqlstate", None) not in _RETRY_STATES:
                raise _failed(error, engine.url, committing=committing) from error
        except (SQLAlchemyError, OSError) as error:
            raise _failed(error, engine.url, committing=committing) from error
    raise AssertionError("unreachable")


def _failed(error: Exception, url: URL, *, committing: bool) -> StorageError:
    """Make the error of a transaction; a commit without an answer may have taken effect."""
    failed = storage_error(error, url)
    answered = getattr(getattr(error, "orig", None), "sqlstate", None) is not None
    if committing and not answered:
        failed.fate = Fate.UNKNOWN
        failed.hint = (
            "The database may have made the change: check its effect before you repeat the call."
        )
    return failed


async def _give_back(connection: AsyncConnection) -> None:
    """Close the connection of a cancelled transaction, because a rollback would wait for a frozen
    database.
    """
    raw = await connection.get_raw_connection()
    terminate = getattr(raw.driver_connection, "terminate", None)
    if terminate is not None:
        terminate()
    await connection.invalidate()


def ending_error() -> StorageError:
    """Make the error for a call after `close`."""
    return StorageError(
        "the metaserver is ending; call another one, or call again", operation="query"
    )


def storage_error(error: Exception, url: URL) -> StorageError:
    """Convert an error of the driver to a StorageError whose message says what to do."""
    lines = str(getattr(error, "orig", None) or error).splitlines()
    text = (
        lines[0] if lines else "no answer in time, or another transaction holds a row that it needs"
    )  # a TimeoutError says nothing
    where = without_password(url.render_as_string(hide_password=True))
    if "unable to open" in text and few_files_left():
        return open_files_error(
            f"cannot use the database {where}", operation="open", path=url.database or ""
        )
    if "not a database" in text:
        damaged = DataFolderError(f"cannot use the database {where}: {text}", operation="open")
        damaged.hint = (
            "Restore it in a new folder (keylane meta restore), or rebuild it from the brokers "
            "(keylane meta rebuild)."
        )
        return damaged
    if "unable to open" in text or "readonly" in text:
        return DataFolderError(f"cannot use the database {where}: {text}", operation="open")
    if "locked" in text:
        return StorageError(
            f"the database {where} is locked by another program; end that program, or wait",
            operation="lock",
        )
    if "disk is full" in text or "No space left" in text:
        return DiskFullError(f"the disk of {where} is full: {text}", operation="write")
    answered = getattr(getattr(error, "orig", None), "sqlstate", None) == READ_ONLY
    if not answered and (
        isinstance(error, OSError) or getattr(error, "connection_invalidated", False)
    ):
        return StorageError(f"cannot reach the database {where}: {text}", operation="connect")
    return StorageError(f"the database {where} answered: {text}", operation="query")
