"""Runs transactions, with retries if the database requests them. A writing transaction completes
even if its caller is cancelled.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from sqlalchemy.engine import URL, Connection
from sqlalchemy.exc import DBAPIError, SQLAlchemyError

from ...protocol.errors import DataFolderError, DiskFullError, Fate, StorageError
from ...protocol.errors.failures import open_files_error
from ...protocol.text import mask_password
from ...rpc.race import shield
from .open_files import lacks_file_descriptors

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

T = TypeVar("T")
ATTEMPTS = 3
CLOSE_S = 2.0
ORPHANED_READ_S = 0.5
"""Maximum time, in seconds, that a read may continue after its caller has been cancelled.
Cancelling it immediately would cost its connection.
"""
_RETRY_STATES = {"40001", "40P01"}  # serialization failure, deadlock
READ_ONLY = "25006"
"""SQLSTATE of writes to a PostgreSQL standby, or with `default_transaction_read_only`."""


class TransactionRunner:
    """
    Runs transactions on asyncio engines.

    A transaction continues if its caller is cancelled, because otherwise its connection would be
    lost; one that only reads is cancelled after `ORPHANED_READ_S`. Errors of such transactions are
    ignored.

    `close` also waits for these transactions, so that every connection is closed.
    """

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()
        self._closed = False

    async def run(
        self,
        engine: AsyncEngine,
        work: Callable[[Connection], T],
        *,
        read_only: bool = False,
    ) -> T:
        """
        Run `work` in a transaction and return its result. Raises StorageError and any error of
        `work`.

        Args:
            read_only: `work` only reads.
        """
        if self._closed:
            raise ending_error()
        task = asyncio.create_task(run_transaction(engine, work))
        self._tasks.add(task)
        task.add_done_callback(self._forget)
        try:
            return await shield(task)
        except asyncio.CancelledError:
            if read_only and not task.done():
                timer = asyncio.get_running_loop().call_later(ORPHANED_READ_S, task.cancel)
                task.add_done_callback(lambda _done: timer.cancel())
            raise

    def _forget(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # mark it as retrieved, because the caller may have been cancelled

    async def close(self) -> None:
        """Refuse new transactions, wait up to `CLOSE_S` for the running ones, then cancel them."""
        self._closed = True
        if not self._tasks:
            return
        _, unfinished_tasks = await asyncio.wait(self._tasks, timeout=CLOSE_S)
        for task in unfinished_tasks:
            task.cancel()
        if unfinished_tasks:
            await asyncio.wait(unfinished_tasks)


async def run_transaction(engine: AsyncEngine, work: Callable[[Connection], T]) -> T:
    """
    Run `work` in a transaction and return its result. After a serialization failure or a deadlock,
    it is retried, with up to `ATTEMPTS` attempts in total.

    Raises:
        StorageError: nothing was changed or, with fate UNKNOWN, the connection was lost during the
            commit.
        Exception: any error of `work`.
    """
    for retries_left in reversed(range(ATTEMPTS)):
        committing = False
        try:
            async with engine.connect() as connection:
                try:
                    async with connection.begin() as transaction:
                        result = await connection.run_sync(work)
                        committing = True
                        await transaction.commit()
                        return result
                except asyncio.CancelledError:
                    await _close_without_rollback(connection)
                    raise
        except DBAPIError as error:
            if not retries_left or getattr(error.orig, "sqlstate", None) not in _RETRY_STATES:
                raise _transaction_error(error, engine.url, committing=committing) from error
        except (SQLAlchemyError, OSError) as error:
            raise _transaction_error(error, engine.url, committing=committing) from error
    raise AssertionError("unreachable")


def _transaction_error(error: Exception, url: URL, *, committing: bool) -> StorageError:
    """Build the error of a transaction. A commit without a reply may have taken effect."""
    storage_failure = storage_error(error, url)
    has_reply = getattr(getattr(error, "orig", None), "sqlstate", None) is not None
    if committing and not has_reply:
        storage_failure.fate = Fate.UNKNOWN
        storage_failure.hint = (
            "The database may have made the change: check whether it did before repeating the call."
        )
    return storage_failure


async def _close_without_rollback(connection: AsyncConnection) -> None:
    """Close the connection of a cancelled transaction without a rollback, which would hang if the
    database is frozen.
    """
    raw_connection = await connection.get_raw_connection()
    terminate = getattr(raw_connection.driver_connection, "terminate", None)
    if terminate is not None:
        terminate()
    await connection.invalidate()


def ending_error() -> StorageError:
    """Build the error for a call after `close`."""
    return StorageError(
        "the metaserver is shutting down; call another one, or try again later", operation="query"
    )


def storage_error(error: Exception, url: URL) -> StorageError:
    """Convert a driver's error to a StorageError whose message says what to do."""
    lines = str(getattr(error, "orig", None) or error).splitlines()
    # A TimeoutError has no message.
    text = (
        lines[0] if lines else "no answer in time, or another transaction holds a row that it needs"
    )
    location = mask_password(url.render_as_string(hide_password=True))
    if "unable to open" in text and lacks_file_descriptors():
        return open_files_error(
            f"cannot use the database {location}", operation="open", path=url.database or ""
        )
    if "not a database" in text:
        folder_error = DataFolderError(
            f"cannot use the database {location}: {text}", operation="open"
        )
        folder_error.hint = (
            "Restore it in a new folder (keylane meta restore), or rebuild it from the brokers "
            "(keylane meta rebuild)."
        )
        return folder_error
    if "unable to open" in text or "readonly" in text:
        return DataFolderError(f"cannot use the database {location}: {text}", operation="open")
    if "locked" in text:
        return StorageError(
            f"the database {location} is locked by another program; end that program, or wait",
            operation="lock",
        )
    if "disk is full" in text or "No space left" in text:
        return DiskFullError(f"the disk of {location} is full: {text}", operation="write")
    is_read_only = getattr(getattr(error, "orig", None), "sqlstate", None) == READ_ONLY
    if not is_read_only and (
        isinstance(error, OSError) or getattr(error, "connection_invalidated", False)
    ):
        return StorageError(f"cannot reach the database {location}: {text}", operation="connect")
    return StorageError(f"the database {location} answered: {text}", operation="query")
