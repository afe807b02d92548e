"""Transactions of this process that lock the row of one consumer group: one at a time, shared by
the calls that wait for it.

One at a time has the row anyhow, so calls that come together, as joins do when many consumers
start, cost one transaction.

On PostgreSQL a transaction that waits for a row has one of few connections meanwhile.  A person, or
a metaserver that stands still, may hold the row of a group for long: without turns, a few consumers
of it that join or have news take all of them, and no other group is served.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Hashable
from functools import partial
from typing import Any, Concatenate, ParamSpec, TypeVar

from sqlalchemy.engine import Connection

from ..sql.database import Database
from ..sql.group_write import GroupWriter
from .sessions import group_of

P = ParamSpec("P")
T = TypeVar("T")
Work = Callable[[Connection], Any]
WAIT_MS = 10_000
"""How long a call waits for its turn: as long as for the row itself."""


class Turns:
    """Runs works with the same key in one transaction after the other, in the order in which they
    came.
    """

    def __init__(self, run: Callable[[Work], Awaitable[Any]]) -> None:
        self._run = run
        self._writers: dict[Hashable, GroupWriter] = {}

    async def run(self, key: Hashable, work: Work) -> Any:
        """
        Return what `work` returns, once it is its turn.  A caller that is cancelled leaves the
        queue, or its work goes on.

        Raises:
            What `work` raises.
            StorageError: its turn did not come in time; `work` has not begun.
        """
        writer = self._writers.get(key)
        if writer is None:
            writer = self._writers[key] = GroupWriter(
                lambda each, _durable: self._run(each),
                wait_ms_max=WAIT_MS,
                idle=partial(self._writers.pop, key),
            )
        return await writer.submit(work, durable=True)


class GroupWrites:
    """Writes that lock the row of one group, in turns if `in_turns`; those for heartbeats have
    turns of their own.
    """

    def __init__(self, database: Database, *, in_turns: bool) -> None:
        self._database = database
        self._turns = Turns(database.write) if in_turns else None
        self._turns_first = Turns(database.write_first) if in_turns else None

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
        done: T = await self._turns.run(group, lambda connection: work(connection, *args, **kwargs))
        return done

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
        done: T = await self._turns_first.run(
            group, lambda connection: work(connection, *args, **kwargs)
        )
        return done
