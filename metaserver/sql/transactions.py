"""Transactions: repeated where the database asks for it, not cancelled with their callers.  I/O: SQL."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Concatenate, ParamSpec, TypeVar

from sqlalchemy.engine import URL, Connection
from sqlalchemy.exc import DBAPIError, SQLAlchemyError

from ...protocol.errors import DataFolderError, DiskFullError, StorageError
from ...protocol.errors.failures import open_files_error
from ...protocol.text import without_password
from .open_files import few_files_left

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncEngine

P = ParamSpec("P")
T = TypeVar("T")
TRIES = 3
CLOSE_S = 2.0
_RETRY_STATES = {"40001", "40P01"}  # serialization failure, deadlock: PostgreSQL asks to try again
READ_ONLY = "25006"
"""The state of an error of PostgreSQL: a standby, or its default_transaction_read_only."""


class TransactionRunner:
    """
    Runs transactions.  A caller that is cancelled does not cancel its transaction: the connection would be lost with it.

    `close` waits for the transactions whose callers are gone, so that every connection is closed.
    """

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[object]] = set()
        self._closed = False

    async def run(
        self,
        engine: AsyncEngine,
        work: Callable[Concatenate[Connection, P], T],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> T:
        """Return what `work` returns in a transaction of its own.  Raises what it raises, and StorageError."""
        if self._closed:
            raise ending_error()
        task = asyncio.create_task(run_transaction(engine, work, *args, **kwargs))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return await asyncio.shield(task)

    async def close(self) -> None:
        """Refuse new transactions; wait `CLOSE_S` for those that run, then cancel them."""
        self._closed = True
        if not self._tasks:
            return
        _, late = await asyncio.wait(self._tasks, timeout=CLOSE_S)
        for task in late:
            task.cancel()
        if late:
            await asyncio.wait(late)


async def run_transaction(
    engine: AsyncEngine,
    work: Callable[Concatenate[Connection, P], T],
    *args: P.args,
    **kwargs: P.kwargs,
) -> T:
    """
    Return what `work` returns in a transaction of its own; tried `TRIES` times where the database asks for it.

    Raises:
        What `work` raises, and StorageError.
    """
    for left in reversed(range(TRIES)):
        try:
            async with engine.begin() as connection:
                return await connection.run_sync(work, *args, **kwargs)
        except DBAPIError as error:
            if not left or getattr(error.orig, "sqlstate", None) not in _RETRY_STATES:
                raise storage_error(error, engine.url) from error
        except (SQLAlchemyError, OSError) as error:
            raise storage_error(error, engine.url) from error
    raise AssertionError("unreachable")


def ending_error() -> StorageError:
    """The error of a call that came after `close`."""
    return StorageError("the metaserver is ending; ask another, or again", operation="query")


def storage_error(error: Exception, url: URL) -> StorageError:
    """The StorageError for an error of the driver; its message says what to do."""
    lines = str(getattr(error, "orig", None) or error).splitlines()
    said = (
        lines[0] if lines else "no answer in time, or another transaction holds a row that it needs"
    )  # a TimeoutError says nothing
    where = without_password(url.render_as_string(hide_password=True))
    if "unable to open" in said and few_files_left():
        return open_files_error(
            f"cannot use the database {where}", operation="open", path=url.database or ""
        )
    if "not a database" in said:
        damaged = DataFolderError(f"cannot use the database {where}: {said}", operation="open")
        damaged.hint = "Restore it in a new folder (keylane meta restore), or make it anew from the brokers (keylane meta rebuild)."
        return damaged
    if "unable to open" in said or "readonly" in said:
        return DataFolderError(f"cannot use the database {where}: {said}", operation="open")
    if "locked" in said:
        return StorageError(
            f"the database {where} is locked by another program; end that program, or wait",
            operation="lock",
        )
    if "disk is full" in said or "No space left" in said:
        return DiskFullError(f"the disk of {where} is full: {said}", operation="write")
    answered = getattr(getattr(error, "orig", None), "sqlstate", None) == READ_ONLY
    if not answered and (
        isinstance(error, OSError) or getattr(error, "connection_invalidated", False)
    ):
        return StorageError(f"cannot reach the database {where}: {said}", operation="connect")
    return StorageError(f"the database {where} answered: {said}", operation="query")
