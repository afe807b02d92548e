"""Runs transactions of this process that lock the row of one consumer group one after the other,
each shared by the calls that wait for it.

Only one transaction can have the row anyhow, so that calls of one moment, such as the joins of many
consumers that start, cost one transaction.

On PostgreSQL a transaction that waits for a row keeps one of few connections meanwhile. A person,
or a metaserver that has stopped, may hold the row of a group for long: without turns, a few
consumers of that group would take all connections, and no other group would be served.
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
"""Longest time, in milliseconds, for which a call waits for its turn; the same as for the row."""


class Turns:
    """
    Serializes work by key: one transaction at a time, in order of arrival. Callers that wait may
    share a transaction.
    """

    def __init__(self, run: Callable[[Work], Awaitable[Any]]) -> None:
        self._run = run
        self._writers: dict[Hashable, GroupWriter] = {}

    async def run(self, key: Hashable, work: Work) -> Any:
        """
        Run `work` when it is its turn, and return its result. If the caller is cancelled, work that
        has not begun leaves the queue, and other work continues.

        Raises:
            Any error that `work` raises.
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
    """Runs writes that lock the row of one group, in turns if `in_turns`; heartbeats have turns of
    their own.
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
        """Call `Database.write` for the group with this id, or with this subject and name."""
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
        """Call `write` for the group of a session."""
        return await self.write(await self.group_of(session), work, *args, **kwargs)

    async def group_of(self, session: str) -> Hashable:
        """Return the group of a session; None: it has none, or there are no turns."""
        return None if self._turns is None else await self._database.read(group_of, session)

    async def write_first(
        self,
        group: Hashable,
        work: Callable[Concatenate[Connection, P], T],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> T:
        """Call `Database.write_first` for a group, see `write`."""
        if self._turns_first is None:
            return await self._database.write_first(work, *args, **kwargs)
        done: T = await self._turns_first.run(
            group, lambda connection: work(connection, *args, **kwargs)
        )
        return done
