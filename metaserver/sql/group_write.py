"""Runs the writes of an SQLite database, or of a consumer group, one after the other: waiting works
share a transaction, separated by savepoints.

    urgent work ─┐                ┌─ SAVEPOINT ─ work ─ RELEASE
    work ────────┼─▶ one BEGIN ──▶├─ SAVEPOINT ─ work ✗ ROLLBACK TO    its error goes to its caller
    work ────────┘                └─ SAVEPOINT ─ work ─ RELEASE ──▶ one COMMIT ──▶ all answers

Heartbeats are urgent: a session that is not renewed in time ends, however many joins are waiting.

Invariants
    A caller is answered after the commit of its work.
    A failed work does not affect others: if the shared transaction fails, each work is tried alone.
    Urgent works run before all others. They wait for at most one transaction, which begins no
    further work after `TRANSACTION_MS_MAX`, and for the one work that is running then.
    Other works do not starve: each transaction does at least one of them, and more while there is
    time.

Source: group commit, as in the brokers' logs; a flush takes milliseconds, a savepoint a hundredth
of one.
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

WORKS_AT_ONCE_MAX = 128
TRANSACTION_MS_MAX = 100
"""Longest time, in milliseconds, for which a transaction begins works: well below a third of the
shortest ttl, and longer than a flush, so that works still share it.
"""
HELD = "another transaction holds the row of this consumer group in the database"
Work = Callable[[Connection], Any]


@dataclass(frozen=True, slots=True)
class _QueuedWork:
    work: Work
    durable: bool
    urgent: bool
    answer: asyncio.Future[Any]
    asked_ms: int


@dataclass(frozen=True, slots=True)
class _Failed:
    error: Exception


class GroupWriter:
    """Gathers works into transactions: urgent ones first, otherwise in the order of arrival."""

    def __init__(
        self,
        run: Callable[[Work, bool], Awaitable[Any]],
        *,
        boot_ms: Callable[[], int] | None = None,
        wait_ms_max: int | None = None,
        idle: Callable[[], object] = lambda: None,
    ) -> None:
        """
        Make a writer.

        Args:
            run: runs one work in one transaction, and raises StorageError if the transaction fails;
                its second argument is `durable`.
            wait_ms_max: time after which a waiting work is not begun any more, and raises
                StorageError; None: no limit.
            idle: called when no work is left.
        """
        self._run = run
        self._wait_ms_max = wait_ms_max
        self._idle = idle
        self._boot_ms = boot_ms or SystemClock.boot_ms
        self._urgent: deque[_QueuedWork] = deque()
        self._waiting: deque[_QueuedWork] = deque()
        self._task: asyncio.Task[None] | None = None
        self._closed = False

    async def submit(self, work: Work, *, durable: bool, urgent: bool = False) -> Any:
        """
        Run `work`, and return its result after its commit.

        Args:
            durable: wait for the disk, not only for the commit.
            urgent: run it before all works that are not urgent.

        Raises:
            Any error of `work`, and StorageError.
        """
        if self._closed:
            raise ending_error()
        answer = asyncio.get_running_loop().create_future()
        queue = self._urgent if urgent else self._waiting
        queue.append(_QueuedWork(work, durable, urgent, answer, self._boot_ms()))
        if self._task is None:
            self._task = asyncio.create_task(self._write())
        return await answer

    async def close(self) -> None:
        """Refuse new works, and wait until all others are done."""
        self._closed = True
        while self._task is not None:
            await asyncio.wait([self._task])

    async def _write(self) -> None:
        try:
            while works := self._next():
                left = await self._write_these(works)
                self._waiting.extendleft(reversed(left))
        finally:
            self._task = None
            self._idle()

    def _is_late(self, queued: _QueuedWork) -> bool:
        waited_ms = self._boot_ms() - queued.asked_ms
        return self._wait_ms_max is not None and waited_ms >= self._wait_ms_max

    def _next(self) -> list[_QueuedWork]:
        """Take the works of the next transaction: urgent ones, then others, at least one of these
        if one waits.
        """
        works: list[_QueuedWork] = []
        for queue, count_max in (
            (self._urgent, WORKS_AT_ONCE_MAX - 1),
            (self._waiting, WORKS_AT_ONCE_MAX),
        ):
            while queue and len(works) < count_max:
                queued = queue.popleft()
                if queued.answer.done():  # its caller is gone
                    continue
                if self._is_late(queued):
                    _answer(queued.answer, _Failed(StorageError(HELD, operation="lock")))
                else:
                    works.append(queued)
        return works

    async def _write_these(self, works: Sequence[_QueuedWork]) -> Sequence[_QueuedWork]:
        """Run these works; returns those for which there was no time."""
        if len(works) > 1:
            durable = any(queued.durable for queued in works)
            try:
                answers = await self._run(lambda connection: self._each(connection, works), durable)
            except StorageError as error:
                # Each is tried alone, to find the one that failed; a locked database has refused
                # them all, and each would wait as long again.
                locked = error.details.get("operation") == "lock"
                late = [queued for queued in works if locked or self._is_late(queued)]
                for queued in late:
                    _answer(queued.answer, _Failed(error.copy(error.fate)))
                works = [queued for queued in works if queued not in late]
            else:
                for queued, answer in zip(works, answers, strict=False):
                    _answer(queued.answer, answer)
                return works[len(answers) :]
        until_ms = self._boot_ms() + TRANSACTION_MS_MAX
        for index, queued in enumerate(works):
            if index and not queued.urgent and self._boot_ms() >= until_ms:
                return works[index:]
            try:
                answer = await self._run(queued.work, queued.durable)
            except Exception as error:  # noqa: BLE001  raised to the caller
                answer = _Failed(error)
            _answer(queued.answer, answer)
        return ()

    def _each(self, connection: Connection, works: Sequence[_QueuedWork]) -> list[Any]:
        """
        Run works in the connection's transaction; returns the result or the error of each one that
        ran.

        Urgent works and the first other one always run, further ones while there is time.
        """
        answers: list[Any] = []
        until_ms = self._boot_ms() + TRANSACTION_MS_MAX
        others = 0
        for queued in works:
            if not queued.urgent:
                others += 1
                if others > 1 and self._boot_ms() >= until_ms:
                    break
            try:
                with connection.begin_nested():
                    answers.append(queued.work(connection))
            except SQLAlchemyError:
                raise
            except Exception as error:  # noqa: BLE001  raised to the caller
                answers.append(_Failed(error))
        return answers


def _answer(future: asyncio.Future[Any], answer: Any) -> None:
    if future.done():  # the caller is gone; its work stays done
        return
    if isinstance(answer, _Failed):
        future.set_exception(answer.error)
    else:
        future.set_result(answer)
