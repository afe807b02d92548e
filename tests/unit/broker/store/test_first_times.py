"""Times of a partition that begin where its parents end: on the disk, once more in the log, and not
too far ahead.
"""

from __future__ import annotations

import logging

import pytest

from keylane.broker.control import BrokerControl
from keylane.broker.partition.image import encode_partition
from keylane.broker.partition.state import AHEAD_MS_MAX
from keylane.broker.storage.log.log_reader import read_segment_headers
from keylane.broker.store.store import CLOCK_LAG_WARN_MS
from keylane.protocol.control import HostPartition
from keylane.protocol.errors import KeylaneError, Reason
from keylane.protocol.record import HEADER_BYTES, Kind
from keylane.testing.machines.disk import SimDisk
from sim.machines.clock import ManualClock
from sim.machines.store import Desk, batch, facts, open_store
from support.raising import raises


def house_of(disk: SimDisk) -> Desk:
    clock = ManualClock()
    return Desk(open_store(disk, clock=clock), clock)


def control_of(desk: Desk) -> BrokerControl:
    return BrokerControl(
        desk.store, broker_group="g1", broker_id="b", clock=desk.clock, registration=lambda: ""
    )


def child(times_from_ms: int = 0) -> HostPartition:
    told = facts(2, parents=(1,))
    return HostPartition(
        subject=told.subject, partition=told.partition, groups=("g",), times_from_ms=times_from_ms
    )


async def first_ms(desk: Desk) -> int:
    """Append to the child; the time of that message."""
    await desk.append(batch(partition_id=2), 2)
    return desk.store.state.partition(2).appended_at_ms


async def test_times_begin_where_they_were_told_when_the_calendar_is_behind():
    """A repeat without a time, as of an older metaserver, changes nothing; the times go on once the
    calendar is there.
    """
    desk = house_of(SimDisk())
    control = control_of(desk)
    await control.host(child(), {})
    from_ms = desk.clock.wall_ms() + 5_000
    await control.host(child(from_ms), {})
    await control.host(child(), {})
    await control.host(child(from_ms - 1), {})
    assert await first_ms(desk) == from_ms
    desk.clock.advance(6_000)
    await desk.append(batch(partition_id=2, sequence=2), 2)
    assert desk.store.state.partition(2).appended_at_ms == from_ms + 1_000
    with raises(Reason.PARTITION_IN_USE):
        await control.host(child(from_ms + 10_000), {})
    assert desk.store.state.partition(2).appended_at_ms == from_ms + 1_000


@pytest.mark.parametrize("snapshot", [False, True])
async def test_times_begin_where_they_were_told_when_the_broker_has_restarted(snapshot: bool):
    """Also where the log no longer has the record of before, and where a snapshot has all."""
    disk = SimDisk()
    desk = house_of(disk)
    from_ms = desk.clock.wall_ms() + 5_000
    await control_of(desk).host(child(), {})
    await control_of(desk).host(child(from_ms), {})
    if snapshot:
        assert await desk.store.snapshotter.write()
    image = encode_partition(desk.store.state.partition(2))
    again = house_of(disk)
    assert not again.store.state.problems
    assert again.store.state.partition(2).facts == desk.store.state.partition(2).facts
    assert encode_partition(again.store.state.partition(2)) == image
    assert await first_ms(again) == from_ms


async def test_times_begin_where_they_were_told_when_only_the_second_record_is_left():
    disk = SimDisk()
    desk = Desk(open_store(disk, clock=ManualClock(), segment_bytes=4096), ManualClock())
    control = control_of(desk)
    await desk.host()
    await control.host(child(), {})
    await desk.append(batch(value=b"v" * 3_300, count=1))
    from_ms = desk.clock.wall_ms() + 5_000
    await control.host(child(from_ms), {})
    await desk.append(batch(value=b"v" * 3_300, count=1, sequence=1))
    await desk.store.carry_over.remove_oldest_segment()
    for name in disk.list("snapshot"):
        disk.remove(f"snapshot/{name}")
    again = house_of(disk)
    assert not again.store.state.problems
    assert again.store.state.partition(2).facts.times_from_ms == 0
    assert await first_ms(again) == from_ms


async def test_second_record_has_the_bytes_of_its_format():
    """The facts once more, and the time as their last field."""
    disk = SimDisk()
    desk = house_of(disk)
    await control_of(desk).host(child(), {})
    await control_of(desk).host(child(1_700_001_005_000), {})
    headers = [header for header in read_segment_headers(disk, 0) if header.kind == Kind.PARTITION]
    (path,) = [f"log/{name}" for name in disk.list("log") if name.endswith(".log")]
    data = bytes(disk.contents[path].data)
    first, second = (
        data[header.position + HEADER_BYTES : header.position + header.length] for header in headers
    )
    assert (first[0], second[0]) == (0x82, 0x83)
    time = b"\xadtimes_from_ms\xcf" + (1_700_001_005_000).to_bytes(8)
    assert second[1:] == first[1:] + time


async def test_times_begin_with_the_calendar_when_what_was_told_is_too_far_ahead(caplog):
    """A calendar that was wrong by years is not handed on, and the log says so."""
    desk = house_of(SimDisk())
    await control_of(desk).host(child(), {})
    with caplog.at_level(logging.WARNING):
        await control_of(desk).host(child(desk.clock.wall_ms() + AHEAD_MS_MAX + 1_000), {})
    assert "86401 s behind the clock of the partition it continues" in caplog.text
    assert await first_ms(desk) == desk.clock.wall_ms()


async def test_log_says_so_when_times_are_held_for_long(caplog):
    desk = house_of(SimDisk())
    await control_of(desk).host(child(), {})
    await control_of(desk).host(child(desk.clock.wall_ms() + CLOCK_LAG_WARN_MS), {})
    assert not caplog.text
    await control_of(desk).host(child(desk.clock.wall_ms() + CLOCK_LAG_WARN_MS + 1_000), {})
    assert "get the same time for 61 s" in caplog.text


async def test_times_begin_with_the_calendar_when_the_record_is_not_written():
    disk = SimDisk()
    desk = house_of(disk)
    await control_of(desk).host(child(), {})
    partition = desk.store.state.partition(2)
    now_ms = desk.clock.wall_ms()
    disk.free_space = 0
    with pytest.raises(KeylaneError) as raised:
        await desk.store.begin_times(partition, now_ms + 1_000)
    assert raised.value.reason is not Reason.PARTITION_IN_USE
    assert partition.appended_at_ms == 0


async def test_partition_begins_where_its_parent_of_the_same_broker_ends_when_the_calendar_was_set_back():
    """Without a word of a metaserver."""
    desk = house_of(SimDisk())
    await desk.host()
    await desk.append(batch())
    ended_ms = desk.store.state.partition(1).appended_at_ms
    sealed = await control_of(desk).seal(None, {"id": "1"})
    assert sealed.ended_at_ms == ended_ms
    desk.clock.wall_offset_ms -= 5_000
    await control_of(desk).host(child(), {})
    assert await first_ms(desk) == ended_ms


async def test_seal_says_the_calendar_when_that_is_past_the_last_message():
    """So does each repeat: a read up to a time that has passed has every message before it."""
    desk = house_of(SimDisk())
    await desk.host()
    await desk.append(batch())
    control = control_of(desk)
    for _ in range(2):
        desk.clock.advance(2_000)
        assert (await control.seal(None, {"id": "1"})).ended_at_ms == desk.clock.wall_ms()
    assert (await control.describe(None, {"id": "1"})).ended_at_ms == 0
