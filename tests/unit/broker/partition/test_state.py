"""The state is a fold over the log: what service decided is what recovery finds."""

from __future__ import annotations

import pytest

from keylane.broker.partition.records import CursorBody, FenceBody, decode_body, encode_body
from keylane.broker.partition.state import AHEAD_MS_MAX, BrokerState
from keylane.protocol.record import HEADER_BYTES, Header, read_record
from keylane.testing.machines.disk import SimDisk
from sim.machines.clock import ManualClock
from sim.machines.store import Desk, batch, facts, open_store


@pytest.mark.parametrize(
    "body", [facts(), FenceBody("audit", 3, "s"), CursorBody("audit", 3, 5, [(7, 9)]), None]
)
def test_bodies_round_trip(body):
    """Every record of the broker's own reads back as what was written."""
    record = encode_body(1, body)
    header = read_record(record)
    assert isinstance(header, Header)
    assert decode_body(header, memoryview(record)[HEADER_BYTES:]) == body


async def test_restart_finds_what_service_had():
    """Offsets, times, producers, fences, sessions, cursors and seals are the same after a
    restart.
    """
    disk, clock = SimDisk(), ManualClock()
    desk = Desk(open_store(disk, clock=clock, segment_bytes=4096), clock)
    for partition_id in (1, 2):
        await desk.host(partition_id)
    for number in range(60):
        await desk.append(batch(sequence=5 * number, count=5, producer_id=1))
        await desk.append(batch(sequence=number, count=1, producer_id=2, epoch=3))
        clock.wall_offset_ms -= 700  # a calendar that runs backwards
    await desk.append(batch(partition_id=2, count=3), 2)
    await desk.acquire(4)
    await desk.ack(4, (0, 7), (9, 11))
    _, durable = desk.store.seal(2)
    await durable

    state = open_store(disk, clock=clock).state
    assert set(state.partitions) == {1, 2}
    for partition_id, was in desk.store.state.partitions.items():
        now = state.partition(partition_id)
        for name in ("facts", "next_offset", "readable_offset", "appended_at_ms", "sealed"):
            assert getattr(now, name) == getattr(was, name), name
        assert now.producers == was.producers
        assert list(now.producers) == list(was.producers)
    group = state.partition(1).groups["audit"]
    assert (group.lock.fence, group.lock.session, group.durable_fence) == (4, "a" * 16, 4)
    assert (group.acked.cursor, group.acked.ranges) == (7, [(9, 11)])
    assert group.lock.holder_at(clock.boot_ms()) is None


async def test_times_within_a_partition_never_fall():
    """A calendar set back does not set back the times of what is appended."""
    disk, clock = SimDisk(), ManualClock()
    desk = Desk(open_store(disk, clock=clock), clock)
    await desk.host()
    times = []
    for number, change in enumerate((0, 500, -3_600_000, 100)):
        clock.wall_offset_ms += change
        await desk.append(batch(sequence=2 * number))
        times.append(desk.store.state.partition(1).appended_at_ms)
    assert times == sorted(times)


async def test_producer_silent_longest_is_forgotten(monkeypatch):
    """A partition remembers a limited number of producers, and a restart remembers the same
    ones.
    """
    monkeypatch.setattr("keylane.broker.partition.partition.PRODUCERS_PER_PARTITION_MAX", 3)
    disk, clock = SimDisk(), ManualClock()
    desk = Desk(open_store(disk, clock=clock), clock)
    await desk.host()
    for producer_id in (1, 2, 3, 1, 4):
        known = desk.store.state.partition(1).producers.get(producer_id)
        sequence = known.next_sequence if known else 0
        await desk.append(batch(producer_id=producer_id, sequence=sequence))

    assert list(desk.store.state.partition(1).producers) == [3, 1, 4]
    assert list(open_store(disk).state.partition(1).producers) == [3, 1, 4]


@pytest.mark.parametrize(
    ("ends", "later_ms"),
    [
        ((2, 3, 0), 3),
        ((-1,), 0),
        ((), 0),
        ((AHEAD_MS_MAX,), AHEAD_MS_MAX),
        ((AHEAD_MS_MAX + 1, 1), 1),
    ],
)
def test_partition_begins_where_the_last_of_its_parents_ends(ends, later_ms):
    """With the calendar, where that is past them, and behind none that ended too far ahead."""
    now_ms = 1_700_000_000_000
    state = BrokerState()
    for number, end_ms in enumerate(ends, 1):
        state.host(facts(number)).appended_at_ms = now_ms + end_ms
    child = state.host(facts(9, parents=(1, 2, 3, 8)))
    assert state.first_time_ms(child, now_ms) == now_ms + later_ms
