"""Changes by another metaserver wake the heartbeats that wait here."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from keylane.metaserver.cluster.brokers import store_report
from keylane.metaserver.cluster.subjects import open_subject, plan_subject
from keylane.metaserver.groups.service import GroupService
from keylane.metaserver.groups.views import group_versions, read_due_work
from keylane.metaserver.settings import MetaserverSettings
from keylane.metaserver.sql.database import SqlDatabase, open_database
from keylane.protocol.clock import SystemClock
from keylane.protocol.control import (
    BrokerHeartbeat,
    CreateSubject,
    Grants,
    Heartbeat,
    Join,
    Leave,
)
from keylane.protocol.errors import SessionUnknownError
from support.sql.told_groups import hear

FIRST, SECOND = "a" * 16, "b" * 16
LONG_MS = 30_000
TTL_MS = 300_000


class Watched:
    """A database that does something else while it reads versions of groups or takes heartbeats."""

    def __init__(self, database: SqlDatabase) -> None:
        self._database = database
        self.meanwhile: Callable[[], Awaitable[None]] | None = None
        self.after_renewal: Callable[[], Awaitable[None]] | None = None
        self.before_write: Callable[[], Awaitable[None]] | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._database, name)

    async def read(self, work: Callable[..., Any], *args: Any) -> Any:
        if work is group_versions and self.meanwhile is not None:
            await self.meanwhile()
        return await self._database.read(work, *args)

    async def renew(self, work: Callable[..., Any], *args: Any) -> Any:
        renewed = await self._database.renew(work, *args)
        if self.after_renewal is not None:
            await self.after_renewal()
        return renewed

    async def write_urgent(self, work: Callable[..., Any], *args: Any) -> Any:
        if self.before_write is not None:
            await self.before_write()
        return await self._database.write_urgent(work, *args)


class TwoMetaservers:
    """Two metaservers over one database; `here` looks around when it is told to."""

    def __init__(self, database: SqlDatabase, folder: Path) -> None:
        settings = MetaserverSettings(data=folder)
        self.database = Watched(database)
        self.here = GroupService(self.database, settings)  # type: ignore[arg-type]

        async def announce(group_id: int, *_more: object) -> None:
            await database.write(hear, group_id)

        self.elsewhere = GroupService(database, settings, announce=announce)

    async def look(self) -> None:
        """As the periodic work does: read what there is, then look for changes."""
        seen = (await self.database.read(read_due_work)).versions
        await self.here.check_for_changes(seen)

    async def join(
        self, session: str, *, group: str = "g", groups: GroupService | None = None
    ) -> None:
        ask = Join(subject="s", group=group, session=session, ttl_ms=TTL_MS)
        await (groups or self.elsewhere).join(ask)

    async def version(self, session: str) -> int:
        """Of its grants now."""
        return (await self.elsewhere.heartbeat(Heartbeat(session=session))).version

    async def waiting(self, session: str, version: int) -> asyncio.Task[Grants]:
        """A long poll that waits for other grants than these."""
        ask = Heartbeat(session=session, known_version=version, wait_ms=LONG_MS)
        task = asyncio.create_task(self.here.heartbeat(ask))
        _, still = await asyncio.wait([task], timeout=0.3)
        assert still
        return task


@pytest.fixture
async def house(tmp_path: Path) -> AsyncIterator[TwoMetaservers]:
    async with open_database(
        folder=tmp_path, url=None, clock=SystemClock(), boot="boot", broker_ttl_ms=TTL_MS
    ) as database:
        body = BrokerHeartbeat(broker_group="g1", broker_id="g1", address="g1:1")
        await database.write(store_report, body, ttl_ms=TTL_MS)
        ask = CreateSubject(subject="s", partitions=6)
        await database.write(plan_subject, ask, subjects_max=10)
        await database.write(open_subject, "s")
        yield TwoMetaservers(database, tmp_path)


async def test_newer_long_poll_is_woken_when_an_older_one_ends(house: TwoMetaservers):
    """Of two long polls of a session the older one ends: a change elsewhere wakes the newer one."""
    await house.join(FIRST)
    version = await house.version(FIRST)
    older = await house.waiting(FIRST, version)
    newer = await house.waiting(FIRST, version)
    older.cancel()
    with suppress(asyncio.CancelledError):
        await older
    await house.here.check_for_changes()
    await house.join(SECOND)
    await house.here.check_for_changes()
    assert (await asyncio.wait_for(newer, LONG_MS / 3_000)).version > version


async def test_waiter_joining_during_a_poll_is_woken_by_the_next_poll(house: TwoMetaservers):
    """A session was renewed before it was ended elsewhere, and waits since the poll that saw it
    ended.
    """
    for session in (FIRST, SECOND):
        await house.join(session)
    first, second = [await house.version(subject) for subject in (FIRST, SECOND)]
    tasks = [await house.waiting(FIRST, first)]

    async def meanwhile() -> None:
        house.database.meanwhile = None
        tasks.append(await house.waiting(SECOND, second))
        await house.elsewhere.leave(Leave(session=SECOND))

    house.database.meanwhile = meanwhile
    await house.here.check_for_changes()
    await house.here.check_for_changes()
    with pytest.raises(SessionUnknownError):
        await asyncio.wait_for(tasks[1], LONG_MS / 3_000)
    tasks[0].cancel()


async def test_poll_wakes_no_session_without_changes(house: TwoMetaservers):
    """A poll that finds no change of a session lets it wait."""
    await house.join(FIRST)
    version = await house.version(FIRST)
    waits = await house.waiting(FIRST, version)
    for _ in range(3):
        await house.here.check_for_changes()
    _, still = await asyncio.wait([waits], timeout=0.3)
    assert still
    await house.elsewhere.leave(Leave(session=FIRST))
    await house.here.check_for_changes()
    with pytest.raises(SessionUnknownError):
        await asyncio.wait_for(waits, LONG_MS / 3_000)


async def test_waiter_joining_after_the_change_that_a_poll_saw_is_woken_by_the_next_poll(
    house: TwoMetaservers,
):
    """Its row is older than the change, and no version rises after the poll that did not know
    it.
    """
    for session in (FIRST, SECOND):
        await house.join(session)
    first, second = [await house.version(session) for session in (FIRST, SECOND)]
    await house.look()
    tasks = [await house.waiting(FIRST, first)]
    await house.look()

    async def renewed_before() -> None:
        house.database.after_renewal = None
        await house.elsewhere.leave(Leave(session=SECOND))
        await house.look()

    house.database.after_renewal = renewed_before
    tasks.append(await house.waiting(SECOND, second))
    await house.look()
    with pytest.raises(SessionUnknownError):
        await asyncio.wait_for(tasks[1], LONG_MS / 3_000)
    tasks[0].cancel()
