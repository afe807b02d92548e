"""Queues transactions that lock the row of the same consumer group, so that at most one of them
runs in this process.

Only one transaction can lock the row at a time anyway. Calls that wait in the queue can share a
transaction, so the joins of many consumers that start together cost only one.

In PostgreSQL, a transaction that waits for a row occupies one of only a few connections. A person
at an SQL prompt, or a metaserver that hangs, may hold the row of a group for a long time. Without
the queue, a few consumers of that group would occupy all connections, and no other group would be
served.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Hashable
from functools import partial
from typing import Any, Concatenate, ParamSpec, TypeVar

from sqlalchemy.engine import Connection

from ..sql.database import Database
from ..sql.group_write import GroupCommitWriter
from .sessions import find_group_id

P = ParamSpec("P")
T = TypeVar("T")
Work = Callable[[Connection], Any]
WAIT_MS = 10_000
"""Maximum time, in milliseconds, that a call waits in the queue; the same as for the lock on the
row.
"""


class KeyedQueue:
    """
    Runs at most one transaction per key at a time, in order of arrival.

    Calls queued behind the same transaction may share the next one.
    """

    def __init__(self, run: Callable[[Work], Awaitable[Any]]) -> None:
        self._run = run
        self._writers: dict[Hashable, GroupCommitWriter] = {}

    async def run(self, key: Hashable, work: Work) -> Any:
        """
        Run `work` after the work queued before it and return its result.

        If the caller is cancelled, work that has not started is removed from the queue.

        Raises:
            StorageError: `work` was still queued after WAIT_MS, and did not run.
            Exception: any error of `work`.
        """
        writer = self._writers.get(key)
        if writer is None:
            writer = self._writers[key] = GroupCommitWriter(
                lambda each, _durable: self._run(each),
                wait_ms_max=WAIT_MS,
                on_idle=partial(self._writers.pop, key),
            )
        return await writer.submit(work, durable=True)


class GroupWrites:
    """Runs writes that lock the row of a group, queued by group if `serialize` is set. Heartbeats
    have a separate queue.
    """

    def __init__(self, database: Database, *, serialize: bool) -> None:
        self._database = database
        self._queue = KeyedQueue(database.write) if serialize else None
        self._priority_queue = KeyedQueue(database.write_urgent) if serialize else None

    async def write(
        self,
        group: Hashable,
        work: Callable[Concatenate[Connection, P], T],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> T:
        """Call `Database.write` for a group, which is given by its id or by its subject and
        name.
        """
        if self._queue is None:
            return await self._database.write(work, *args, **kwargs)
        result: T = await self._queue.run(
            group, lambda connection: work(connection, *args, **kwargs)
        )
        return result

    async def find_group_id(self, session: str) -> Hashable:
        """Return the id of a session's group. Return None if it has none or if writes are not
        queued.
        """
        return None if self._queue is None else await self._database.read(find_group_id, session)

    async def write_urgent(
        self,
        group: Hashable,
        work: Callable[Concatenate[Connection, P], T],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> T:
        """Call `Database.write_urgent` for a group; see `write`."""
        if self._priority_queue is None:
            return await self._database.write_urgent(work, *args, **kwargs)
        result: T = await self._priority_queue.run(
            group, lambda connection: work(connection, *args, **kwargs)
        )
        return result
