"""A new group's start at brokers that answer, are silent, or have lost what they had."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from keylane.metaserver.retention.announcer import CALL_TIMEOUT_MS
from keylane.metaserver.starts.rows import pending_starts
from keylane.metaserver.starts.service import STORE_PAUSES_MS, StartService
from keylane.protocol.control import GroupStatus, PartitionStatus
from keylane.protocol.endpoints import WORK_MS
from keylane.protocol.errors import (
    NotSentError,
    OffsetOutOfRangeError,
    OverloadedError,
    Reason,
)
from keylane.protocol.groups import CreateGroup, GroupStart, StartAt
from keylane.protocol.progress import SetCursor
from keylane.protocol.routing import PartitionState
from support.raising import raises
from support.sql.rows import Rows
from support.sql.told_groups import hear

LATEST = CreateGroup(start=GroupStart(at=StartAt.LATEST))
EARLIEST = CreateGroup()


class StartBrokers:
    """A network with the brokers of partitions that end at `ends`."""

    def __init__(self, *ends: int) -> None:
        self.ends = dict(enumerate(ends, 1))
        self.refusing: set[int] = set()
        """Partitions whose brokers store no cursor."""
        self.cursors: dict[int, SetCursor] = {}

    async def control(self, method: str, address: str, path: str, *args: Any, **kwargs: Any) -> Any:
        partition_id = int(path.split("/")[3])
        body = kwargs.get("body")
        end = self.ends.get(partition_id)
        if end is None:
            raise NotSentError("it is silent")
        groups = ()
        if isinstance(body, SetCursor):
            if partition_id in self.refusing:
                raise OverloadedError("223 bytes are waiting for the disk")
            if body.cursor > end:
                raise OffsetOutOfRangeError(offset=body.cursor, first_offset=0, next_offset=end)
            self.cursors[partition_id] = body
            groups = (
                GroupStatus(group="g", token=body.token, cursor=body.cursor, acked_above=0, lag=0),
            )
        return PartitionStatus(
            partition_id=partition_id,
            subject="s",
            name="p",
            state=PartitionState.OPEN,
            first_offset=0,
            next_offset=end,
            groups=groups,
        )


class RowsOfStarts(Rows):
    """The database, as a service asks it."""

    async def read(self, work: Any, *args: Any, **kwargs: Any) -> Any:
        return self.run(work, *args, **kwargs)

    write = read


class StartDesk:
    """A service over a database with a subject of two partitions."""

    def __init__(self, *ends: int) -> None:
        self.rows = RowsOfStarts()
        self.rows.report("g1")
        self.rows.create("s", 2)
        self.brokers = StartBrokers(*ends)
        self.told: list[int] = []
        self.hears = True
        """False: the brokers do not answer an announcement."""
        self.hung_s = 0.0
        """How long brokers that do not answer were waited for."""
        self.service = StartService(self.rows, self.brokers, announce=self.announce)  # type: ignore[arg-type]

    async def announce(self, group_id: int) -> None:
        self.told.append(group_id)
        if self.hears:
            self.rows.run(hear, group_id)
        else:
            self.hung_s += CALL_TIMEOUT_MS / 1000

    @property
    def pending(self) -> list[int]:
        return [start.partition_id for start in self.rows.run(pending_starts, limit=9)]


@pytest.fixture(autouse=True)
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """No time passes; what was slept."""
    slept: list[float] = []
    sleep = asyncio.sleep

    async def note(seconds: float) -> None:
        slept.append(seconds)
        await sleep(0)

    monkeypatch.setattr(asyncio, "sleep", note)
    return slept


async def test_created_group_is_announced_and_at_the_ends():
    """A repeat sets nothing again; another start is refused with both."""
    desk = StartDesk(100, 50)
    made = await desk.service.create("s", "g", LATEST)
    cursors = {number: ask.cursor for number, ask in desk.brokers.cursors.items()}
    assert cursors == {1: 100, 2: 50}
    assert (made.unstarted, len(desk.told), desk.pending) == ((), 1, [])
    desk.brokers.ends = {1: 900, 2: 900}
    desk.brokers.cursors.clear()
    assert await desk.service.create("s", "g", LATEST) == made
    assert desk.brokers.cursors == {}
    with raises(Reason.GROUP_EXISTS) as refused:
        await desk.service.create("s", "g", EARLIEST)
    assert (refused.value.stored, refused.value.asked) == (
        "exclusive, latest",
        "exclusive, earliest",
    )


async def test_group_at_the_earliest_asks_no_broker():
    """There is no offset to read, and no cursor to store."""
    desk = StartDesk()
    assert (await desk.service.create("s", "g", EARLIEST)).unstarted == ()
    assert desk.brokers.cursors == {}


async def test_created_group_is_unfinished_until_its_brokers_know_it(pauses: list[float]):
    """A broker that does not know it would remove messages that are sent from now on."""
    desk = StartDesk()
    desk.hears = False
    with raises(Reason.GROUP_START_UNFINISHED) as unfinished:
        await desk.service.create("s", "g", EARLIEST)
    assert unfinished.value.partitions == 2
    assert len(desk.told) == len(pauses) + 1
    desk.hears = True
    assert (await desk.service.create("s", "g", EARLIEST)).unstarted == ()


async def test_creation_ends_in_time_while_a_broker_hangs(monkeypatch: pytest.MonkeyPatch):
    """The caller is told that the group exists, rather than left without an answer."""
    desk = StartDesk()
    desk.hears = False
    loop = asyncio.get_running_loop()
    begun_s = loop.time()
    monkeypatch.setattr(loop, "time", lambda: begun_s + desk.hung_s)
    with raises(Reason.GROUP_START_UNFINISHED):
        await desk.service.create("s", "g", EARLIEST)
    assert len(desk.told) == 3, "the last round begins 4 seconds after the call"
    assert desk.hung_s * 1000 < WORK_MS / 2


async def test_group_at_the_earliest_is_created_while_a_broker_is_silent():
    """The call says so, and does not announce it again to a broker that cannot hear it."""
    desk = StartDesk()
    desk.rows.silence("g1")
    desk.hears = False
    with raises(Reason.GROUP_START_UNFINISHED) as unfinished:
        await desk.service.create("s", "g", EARLIEST)
    assert (unfinished.value.partitions, len(desk.told)) == (2, 1)
    desk.rows.report("g1")
    desk.hears = True
    assert (await desk.service.create("s", "g", EARLIEST)).unstarted == ()


async def test_created_group_of_a_subject_kept_by_time_needs_no_announcement():
    """Its brokers remove messages without regard to groups."""
    desk = StartDesk()
    desk.hears = False
    by_time = "UPDATE subjects SET retention = 'time'"
    desk.rows.run(lambda connection: connection.exec_driver_sql(by_time))
    assert (await desk.service.create("s", "g", EARLIEST)).unstarted == ()


async def test_silent_broker_lets_no_group_be_made():
    """Its partition may have any end."""
    desk = StartDesk(100)
    with pytest.raises(NotSentError, match="partition 2"):
        await desk.service.create("s", "g", LATEST)
    assert desk.told == []


async def test_start_that_a_broker_did_not_store_is_stored_later(pauses: list[float]):
    """With the cursor that was fixed, whatever was sent meanwhile; the others are done."""
    desk = StartDesk(100, 50)
    desk.brokers.refusing = {2}
    with raises(Reason.GROUP_START_UNFINISHED) as unfinished:
        await desk.service.create("s", "g", LATEST)
    assert unfinished.value.partitions == 1
    assert pauses == [pause_ms / 1000 for pause_ms in STORE_PAUSES_MS]
    assert (desk.pending, set(desk.brokers.cursors)) == ([2], {1})
    assert len(desk.told) == 1, "its brokers know it"
    desk.brokers.ends = {1: 900, 2: 900}
    await desk.service.resume()
    assert desk.pending == [2]
    desk.brokers.refusing = set()
    await desk.service.resume()
    assert desk.pending == []
    assert desk.brokers.cursors[2].cursor == 50


async def test_start_behind_the_end_of_an_older_copy_is_its_end():
    """The messages before the cursor are gone with the original."""
    desk = StartDesk(100, 50)
    desk.brokers.refusing = {2}
    with raises(Reason.GROUP_START_UNFINISHED):
        await desk.service.create("s", "g", LATEST)
    desk.brokers.refusing, desk.brokers.ends = set(), {1: 100, 2: 40}
    await desk.service.resume()
    assert desk.brokers.cursors[2].cursor == 40
    assert desk.pending == []


async def test_expired_partition_needs_no_start():
    """It has no message left, and no broker stores a cursor for it."""
    desk = StartDesk(100, 50)
    desk.brokers.refusing = {2}
    with raises(Reason.GROUP_START_UNFINISHED):
        await desk.service.create("s", "g", LATEST)
    expire = "UPDATE partitions SET state = 'expired' WHERE partition_id = 2"
    desk.rows.run(lambda connection: connection.exec_driver_sql(expire))
    await desk.service.resume()
    assert desk.pending == []
