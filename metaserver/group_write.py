"""One writer for an SQLite database: works that wait are done in one transaction, each as if it were alone.

    work ─┐                ┌─ SAVEPOINT ─ work ─ RELEASE
    work ─┼─▶ one BEGIN ──▶├─ SAVEPOINT ─ work ✗ ROLLBACK TO    its own error, nothing of it stays
    work ─┘                └─ SAVEPOINT ─ work ─ RELEASE ──▶ one COMMIT, one flush ──▶ all answers

Invariants
    Nobody is answered before the commit that carries his work.
    A work that fails takes nothing from the others: if their common transaction fails, each is tried alone.

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

from ..protocol.errors import StorageError

WORKS_AT_ONCE_MAX = 128
Work = Callable[[Connection], Any]


@dataclass(frozen=True, slots=True)
class _Waiting:
    work: Work
    durable: bool
    answer: asyncio.Future[Any]


@dataclass(frozen=True, slots=True)
class _Failed:
    error: Exception


class GroupWriter:
    """Gathers works into transactions, in the order in which they came."""

    def __init__(self, run: Callable[[Work, bool], Awaitable[Any]]) -> None:
        """`run(work, durable)` runs one work in one transaction and raises StorageError if that fails."""
        self._run = run
        self._waiting: deque[_Waiting] = deque()
        self._task: asyncio.Task[None] | None = None

    async def submit(self, work: Work, *, durable: bool) -> Any:
        """
        What `work` answers, once that is committed.

        Args:
            durable: the answer waits for the disk; without it only for the commit.

        Raises:
            What `work` raises, and StorageError.
        """
        answer = asyncio.get_running_loop().create_future()
        self._waiting.append(_Waiting(work, durable, answer))
        if self._task is None:
            self._task = asyncio.create_task(self._write())
        return await answer

    async def close(self) -> None:
        """Wait until nothing is under way."""
        while self._task is not None:
            await asyncio.wait([self._task])

    async def _write(self) -> None:
        try:
            while self._waiting:
                count = min(len(self._waiting), WORKS_AT_ONCE_MAX)
                await self._write_these([self._waiting.popleft() for _ in range(count)])
        finally:
            self._task = None

    async def _write_these(self, some: Sequence[_Waiting]) -> None:
        some = [one for one in some if not one.answer.done()]  # who gave up before it began
        if len(some) > 1:
            works = [one.work for one in some]
            durable = any(one.durable for one in some)
            try:
                answers = await self._run(lambda connection: _each(connection, works), durable)
            except StorageError:
                pass  # one of them, or all: each alone shows which
            else:
                for one, answer in zip(some, answers, strict=True):
                    _tell(one.answer, answer)
                return
        for one in some:
            try:
                answer = await self._run(one.work, one.durable)
            except Exception as error:  # noqa: BLE001  whatever it is, it is the caller's
                answer = _Failed(error)
            _tell(one.answer, answer)


def _tell(future: asyncio.Future[Any], answer: Any) -> None:
    if future.done():  # the caller gave up; what was done is done
        return
    if isinstance(answer, _Failed):
        future.set_exception(answer.error)
    else:
        future.set_result(answer)


def _each(connection: Connection, works: Sequence[Work]) -> list[Any]:
    """The answer of each work, or what it failed with, all in the connection's transaction."""
    answers: list[Any] = []
    for work in works:
        try:
            with connection.begin_nested():
                answers.append(work(connection))
        except SQLAlchemyError:
            raise
        except Exception as error:  # noqa: BLE001  whatever it is, it is the caller's
            answers.append(_Failed(error))
    return answers
