"""How many transactions of this process lock the row of one consumer group at once.

On PostgreSQL a transaction that waits for a row has one of few connections meanwhile.  A person, or a metaserver that stands
still, may hold the row of a group for long: without turns, a few consumers of it that join or have news take all of them,
and no other group is served.  One at a time has the row anyhow.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Hashable
from dataclasses import dataclass, field
from typing import Any, Concatenate, ParamSpec, TypeVar

from sqlalchemy.engine import Connection

from ...protocol.errors import StorageError
from ..sql.database import Database
from .sessions import group_of

P = ParamSpec("P")
T = TypeVar("T")
AT_ONCE_MAX = 2
"""The second one is asked for while the first one is stored."""
WAIT_S = 10.0
"""How long a call waits for its turn: as long as for the row itself."""
HELD = "another transaction holds the row of this consumer group in the database"


@dataclass(slots=True)
class _Row:
    free: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(AT_ONCE_MAX))
    calls: int = 0
    """Those that run or wait."""


class Turns:
    """Lets calls with the same key run AT_ONCE_MAX at once, in the order of their arrival."""

    def __init__(self) -> None:
        self._rows: dict[Hashable, _Row] = {}

    async def run(self, key: Hashable, call: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """
        Return what `call` returns, once it is its turn.  A caller that is cancelled takes its turn to the end, or leaves the queue.

        Raises:
            What `call` raises.
            StorageError: its turn did not come in time; `call` has not begun.
        """
        row = self._rows.setdefault(key, _Row())
        row.calls += 1
        try:
            async with asyncio.timeout(WAIT_S):
                await row.free.acquire()
        except BaseException as error:
            self._leave(key, row)
            if isinstance(error, TimeoutError):
                raise StorageError(HELD, operation="lock") from None
            raise
        task = asyncio.create_task(call())

        def ended(done: asyncio.Task[T]) -> None:
            row.free.release()
            self._leave(key, row)
            if not done.cancelled():
                done.exception()  # its caller raises it, unless that was cancelled

        task.add_done_callback(ended)
        return await asyncio.shield(task)

    def _leave(self, key: Hashable, row: _Row) -> None:
        row.calls -= 1
        if not row.calls:
            del self._rows[key]


class GroupWrites:
    """Writes that lock the row of one group, in turns if `in_turns`; those for heartbeats have turns of their own."""

    def __init__(self, database: Database, *, in_turns: bool) -> None:
        self._database = database
        self._turns, self._turns_first = (Turns() if in_turns else None for _ in range(2))

    async def write(
        self,
        group: Hashable,
        work: Callable[Concatenate[Connection, P], T],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> T:
        """As `Database.write`, for a group that has this id, or this subject and name."""
        if self._turns is None:
            return await self._database.write(work, *args, **kwargs)
        return await self._turns.run(group, lambda: self._database.write(work, *args, **kwargs))

    async def write_of(
        self,
        session: str,
        work: Callable[Concatenate[Connection, P], T],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> T:
        """As `write`, for the group of a session."""
        return await self.write(await self.group_of(session), work, *args, **kwargs)

    async def group_of(self, session: str) -> Hashable:
        """The group of a session; None: it has none, or there are no turns."""
        return None if self._turns is None else await self._database.read(group_of, session)

    async def write_first(
        self,
        group: Hashable,
        work: Callable[Concatenate[Connection, P], T],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> T:
        """As `Database.write_first`."""
        if self._turns_first is None:
            return await self._database.write_first(work, *args, **kwargs)
        return await self._turns_first.run(
            group, lambda: self._database.write_first(work, *args, **kwargs)
        )
