"""Serializes the writes to an SQLite database, or to a consumer group. Queued work shares a
transaction, separated by savepoints.

    urgent work ─┐                ┌─ SAVEPOINT ─ work ─ RELEASE
    work ────────┼─▶ one BEGIN ──▶├─ SAVEPOINT ─ work ✗ ROLLBACK TO    the error goes to its caller
    work ────────┘                └─ SAVEPOINT ─ work ─ RELEASE ──▶ one COMMIT ──▶ all results

Heartbeats are urgent: a session that is not renewed in time ends, even if many joins are waiting.

Invariants
    A caller gets its result after the commit of its work.
    Failed work does not affect other work. If the shared transaction fails, each item is retried in
    a transaction of its own.
    Urgent work runs before all other work. It waits for at most one transaction, which starts no
    more work after `TRANSACTION_MS_MAX`.
    Normal work does not starve. Each transaction runs at least one item of it, and more if there is
    time.

This is group commit, as in the logs of brokers: a flush takes milliseconds, and a savepoint a
hundredth of that.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy.engine import Connection
from sqlalchemy.exc import SQLAlchemyError

from ...protocol.clock import SystemClock
from ...protocol.errors import StorageError
from .transactions import ending_error

BATCH_MAX = 128
TRANSACTION_MS_MAX = 100
"""Time, in milliseconds, after which a transaction starts no more work. It is well below a third of
the shortest ttl, but longer than a flush, so that transactions are still shared.
"""
ROW_LOCKED = "another transaction holds the row of this consumer group in the database"
Work = Callable[[Connection], Any]


@dataclass(frozen=True, slots=True)
class _QueuedWork:
    """Work that is waiting in the queue, and the future that gets its result."""

    work: Work
    durable: bool
    urgent: bool
    future: asyncio.Future[Any]
    queued_ms: int


@dataclass(frozen=True, slots=True)
class _Failure:
    """The error of an item of work, in place of a result."""

    error: Exception


class GroupCommitWriter:
    """Batches queued work into transactions: urgent work first, otherwise in order of arrival."""

    def __init__(
        self,
        run: Callable[[Work, bool], Awaitable[Any]],
        *,
        boot_ms: Callable[[], int] | None = None,
        wait_ms_max: int | None = None,
        on_idle: Callable[[], object] = lambda: None,
    ) -> None:
        """
        Create a writer.

        Args:
            run: runs work in a transaction, and raises StorageError if the transaction fails; its
                second argument is `durable`.
            boot_ms: the clock; by default the system clock.
            wait_ms_max: time, in milliseconds, after which queued work is no longer started and
                fails with a StorageError; None means no limit.
            on_idle: called when the queue becomes empty.
        """
        self._run = run
        self._wait_ms_max = wait_ms_max
        self._on_idle = on_idle
        self._boot_ms = boot_ms or SystemClock.boot_ms
        self._urgent_queue: deque[_QueuedWork] = deque()
        self._normal_queue: deque[_QueuedWork] = deque()
        self._task: asyncio.Task[None] | None = None
        self._closed = False

    async def submit(self, work: Work, *, durable: bool, urgent: bool = False) -> Any:
        """
        Run `work` and return its result after it has been committed.

        Args:
            durable: wait until the commit is on disk.
            urgent: run this before all work that is not urgent.

        Raises:
            StorageError: the transaction failed, or the work was not started in time.
            Exception: any error of `work`.
        """
        if self._closed:
            raise ending_error()
        future = asyncio.get_running_loop().create_future()
        queue = self._urgent_queue if urgent else self._normal_queue
        queue.append(_QueuedWork(work, durable, urgent, future, self._boot_ms()))
        if self._task is None:
            self._task = asyncio.create_task(self._write())
        return await future

    async def close(self) -> None:
        """Refuse new work and wait until the queued work is done."""
        self._closed = True
        while self._task is not None:
            await asyncio.wait([self._task])

    async def _write(self) -> None:
        """Run batches until the queues are empty."""
        try:
            while batch := self._take_batch():
                unstarted_units = await self._run_batch(batch)
                self._normal_queue.extendleft(reversed(unstarted_units))
        finally:
            self._task = None
            self._on_idle()

    def _is_late(self, queued: _QueuedWork) -> bool:
        """Return True if the work has waited too long to be started."""
        waited_ms = self._boot_ms() - queued.queued_ms
        return self._wait_ms_max is not None and waited_ms >= self._wait_ms_max

    def _take_batch(self) -> list[_QueuedWork]:
        """Remove the work for the next transaction from the queues: urgent work first, then at
        least one item of normal work, if there is any.
        """
        batch: list[_QueuedWork] = []
        for queue, count_max in (
            (self._urgent_queue, BATCH_MAX - 1),
            (self._normal_queue, BATCH_MAX),
        ):
            while queue and len(batch) < count_max:
                queued = queue.popleft()
                if queued.future.done():  # its caller was cancelled
                    continue
                if self._is_late(queued):
                    _resolve(queued.future, _Failure(StorageError(ROW_LOCKED, operation="lock")))
                else:
                    batch.append(queued)
        return batch

    async def _run_batch(self, batch: Sequence[_QueuedWork]) -> Sequence[_QueuedWork]:
        """Run a batch. Return the work that was not started for lack of time."""
        if len(batch) > 1:
            durable = any(queued.durable for queued in batch)
            try:
                results = await self._run(
                    lambda connection: self._run_in_savepoints(connection, batch), durable
                )
            except StorageError as error:
                # Each item is retried separately, because only one of them may have failed.
                # However, if the database was locked, each retry would wait just as long again.
                is_locked = error.details.get("operation") == "lock"
                failed_work = [queued for queued in batch if is_locked or self._is_late(queued)]
                for queued in failed_work:
                    _resolve(queued.future, _Failure(error.copy(error.fate)))
                batch = [queued for queued in batch if queued not in failed_work]
            else:
                for queued, result in zip(batch, results, strict=False):
                    _resolve(queued.future, result)
                return batch[len(results) :]
        deadline_ms = self._boot_ms() + TRANSACTION_MS_MAX
        for index, queued in enumerate(batch):
            if index and not queued.urgent and self._boot_ms() >= deadline_ms:
                return batch[index:]
            try:
                result = await self._run(queued.work, queued.durable)
            except Exception as error:  # noqa: BLE001  raised to the caller
                result = _Failure(error)
            _resolve(queued.future, result)
        return ()

    def _run_in_savepoints(self, connection: Connection, batch: Sequence[_QueuedWork]) -> list[Any]:
        """
        Run a batch in the connection's transaction. Return the result or error of each item that
        was started.

        Urgent work and the first normal item always run; further items run only if there is time.
        """
        results: list[Any] = []
        deadline_ms = self._boot_ms() + TRANSACTION_MS_MAX
        normal_count = 0
        for queued in batch:
            if not queued.urgent:
                normal_count += 1
                if normal_count > 1 and self._boot_ms() >= deadline_ms:
                    break
            try:
                with connection.begin_nested():
                    results.append(queued.work(connection))
            except SQLAlchemyError:
                raise
            except Exception as error:  # noqa: BLE001  raised to the caller
                results.append(_Failure(error))
        return results


def _resolve(future: asyncio.Future[Any], result: Any) -> None:
    """Pass a result or error on to the caller that is waiting for it."""
    if future.done():  # the caller was cancelled, but its work is committed
        return
    if isinstance(result, _Failure):
        future.set_exception(result.error)
    else:
        future.set_result(result)
