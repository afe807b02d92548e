"""One writer for an SQLite database: works that wait are done in one transaction, each as if it were alone.

    urgent work ─┐                ┌─ SAVEPOINT ─ work ─ RELEASE
    work ────────┼─▶ one BEGIN ──▶├─ SAVEPOINT ─ work ✗ ROLLBACK TO    its own error, nothing of it stays
    work ────────┘                └─ SAVEPOINT ─ work ─ RELEASE ──▶ one COMMIT, one flush ──▶ all answers

Heartbeats are urgent: whoever is not renewed in time loses its session, however many joins are waiting.

Invariants
    Nobody is answered before the commit that carries his work.
    A work that fails takes nothing from the others: if their common transaction fails, each is tried alone.
    Urgent works go before all others that wait.  They wait for one transaction at most, which begins no other work once
    it has run for `TRANSACTION_MS_MAX`, and for one work more where that is a long one.
    Other works are not starved: each transaction does one of them at least, and as many as there is time for.

Source: group commit, as the brokers' logs do it; a flush costs milliseconds, a savepoint a hundredth of one.
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
"""Well below a third of the shortest ttl; longer than a flush, so that works still share it."""
Work = Callable[[Connection], Any]


@dataclass(frozen=True, slots=True)
class _Waiting:
    work: Work
    durable: bool
    urgent: bool
    answer: asyncio.Future[Any]


@dataclass(frozen=True, slots=True)
class _Failed:
    error: Exception


class GroupWriter:
    """Gathers works into transactions, in the order in which they came, the urgent ones first."""

    def __init__(
        self,
        run: Callable[[Work, bool], Awaitable[Any]],
        *,
        boot_ms: Callable[[], int] | None = None,
    ) -> None:
        """`run(work, durable)` runs one work in one transaction and raises StorageError if that fails."""
        self._run = run
        self._boot_ms = boot_ms or SystemClock.boot_ms
        self._urgent: deque[_Waiting] = deque()
        self._waiting: deque[_Waiting] = deque()
        self._task: asyncio.Task[None] | None = None
        self._closed = False

    async def submit(self, work: Work, *, durable: bool, urgent: bool = False) -> Any:
        """
        What `work` answers, once that is committed.

        Args:
            durable: the answer waits for the disk; without it only for the commit.
            urgent: before all works that are not.

        Raises:
            What `work` raises, and StorageError.
        """
        if self._closed:
            raise ending_error()
        answer = asyncio.get_running_loop().create_future()
        queue = self._urgent if urgent else self._waiting
        queue.append(_Waiting(work, durable, urgent, answer))
        if self._task is None:
            self._task = asyncio.create_task(self._write())
        return await answer

    async def close(self) -> None:
        """Refuse new works; wait until all others are done."""
        self._closed = True
        while self._task is not None:
            await asyncio.wait([self._task])

    async def _write(self) -> None:
        try:
            while some := self._next():
                left = await self._write_these(some)
                self._waiting.extendleft(reversed(left))
        finally:
            self._task = None

    def _next(self) -> list[_Waiting]:
        """The works of the next transaction: urgent ones, then others, of which there is always one if any waits."""
        some: list[_Waiting] = []
        for queue, count_max in (
            (self._urgent, WORKS_AT_ONCE_MAX - 1),
            (self._waiting, WORKS_AT_ONCE_MAX),
        ):
            while queue and len(some) < count_max:
                one = queue.popleft()
                if not one.answer.done():  # else its caller gave up before it began
                    some.append(one)
        return some

    async def _write_these(self, some: Sequence[_Waiting]) -> Sequence[_Waiting]:
        """Do these works; those for which there was no time."""
        if len(some) > 1:
            durable = any(one.durable for one in some)
            try:
                answers = await self._run(lambda connection: self._each(connection, some), durable)
            except StorageError:
                pass  # one of them, or all: each alone shows which
            else:
                for one, answer in zip(some, answers, strict=False):
                    _tell(one.answer, answer)
                return some[len(answers) :]
        until_ms = self._boot_ms() + TRANSACTION_MS_MAX
        for index, one in enumerate(some):
            if index and not one.urgent and self._boot_ms() >= until_ms:
                return some[index:]
            try:
                answer = await self._run(one.work, one.durable)
            except Exception as error:  # noqa: BLE001  whatever it is, it is the caller's
                answer = _Failed(error)
            _tell(one.answer, answer)
        return ()

    def _each(self, connection: Connection, some: Sequence[_Waiting]) -> list[Any]:
        """
        The answer of each work, or what it failed with, all in the connection's transaction.

        Of works that are not urgent the first one is done, and more while there is time.
        """
        answers: list[Any] = []
        until_ms = self._boot_ms() + TRANSACTION_MS_MAX
        others = 0
        for one in some:
            if not one.urgent:
                others += 1
                if others > 1 and self._boot_ms() >= until_ms:
                    break
            try:
                with connection.begin_nested():
                    answers.append(one.work(connection))
            except SQLAlchemyError:
                raise
            except Exception as error:  # noqa: BLE001  whatever it is, it is the caller's
                answers.append(_Failed(error))
        return answers


def _tell(future: asyncio.Future[Any], answer: Any) -> None:
    if future.done():  # the caller gave up; what was done is done
        return
    if isinstance(answer, _Failed):
        future.set_exception(answer.error)
    else:
        future.set_result(answer)
