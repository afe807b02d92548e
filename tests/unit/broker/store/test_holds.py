"""Holds of jobs: retention waits for them, they expire, and a restart finds them again for at most
their ttl.
"""

from __future__ import annotations

import random

import pytest

from keylane.broker.partition.image import (
    decode_partition,
    encode_partition,
    encode_partition_parts,
)
from keylane.broker.retention.loop import RetentionLoop
from keylane.broker.store.group_changes import drop_partition, register_groups_at
from keylane.protocol.control import DropPartition, Retention
from keylane.protocol.errors import (
    OffsetOutOfRangeError,
    OverloadedError,
    Reason,
)
from keylane.protocol.reprocess.holds import HOLDS_PER_PARTITION_MAX, HoldView, SetHold
from keylane.testing.machines.disk import SimDisk
from sim.machines.clock import ManualClock
from sim.machines.store import Desk, batch, facts, in_place, open_store, settings_of
from support.raising import raises

HOUR = 3_600_000
TTL_MS = 600_000


class HoldingBroker:
    """A broker whose messages are an hour apart, and which no consumer group reads."""

    def __init__(self) -> None:
        self.disk, self.clock = SimDisk(), ManualClock()
        self.open()

    def open(self) -> None:
        self.store = open_store(self.disk, clock=self.clock, segment_bytes=4096, cache_bytes=0)
        self.desk = Desk(self.store, self.clock)
        self.cleaning = RetentionLoop(
            self.store,
            self.disk,
            settings_of(segment_bytes=4096),
            clock=self.clock,
            run_commit=in_place,
            run_read=in_place,
        )

    def kill(self) -> None:
        self.disk = self.disk.disk_after_crash(random.Random(1))
        self.open()

    async def fill(self, batches: int = 100, *, retention: Retention | None = None) -> None:
        told = facts()
        _, durable = self.store.host(
            type(told)(subject=told.subject, partition=told.partition, retention=retention)
        )
        await durable
        await register_groups_at(self.store, self.partition, (), complete=True)
        for number in range(batches):
            self.clock.advance(HOUR)
            await self.desk.append(batch(sequence=2 * number))

    @property
    def partition(self):
        return self.store.state.partition(1)

    async def hold(self, job: str = "backfill", *, start: int = 10, ttl_ms: int = TTL_MS) -> None:
        await self.store.holds.apply_request(
            self.partition, SetHold(job=job, from_offset=start, ttl_ms=ttl_ms)
        )

    def left(self) -> dict[str, int]:
        return {view.job: view.left_ms for view in self.store.holds.list_views(self.partition)}


@pytest.mark.parametrize("retention", [None, Retention.TIME])
async def test_hold_keeps_messages_until_it_expires(retention):
    """Held messages stay whatever the retention, those below the hold go, and a dead job holds them
    for its ttl only.
    """
    house = HoldingBroker()
    await house.fill(150, retention=retention)
    await house.hold(start=100)
    await house.cleaning.check()
    assert 0 < house.partition.first_offset <= 100
    assert "jobs hold messages of partition 1" in house.cleaning.problem
    house.clock.advance(TTL_MS)
    await house.cleaning.check()
    assert house.partition.first_offset > 100
    assert house.partition.holds == {}


async def test_renewed_hold_lasts_and_writes_nothing():
    house = HoldingBroker()
    await house.fill(3)
    await house.hold(start=2)
    end = house.store.log.end
    house.clock.advance(TTL_MS - 1)
    await house.hold(start=2)
    assert house.store.log.end == end
    house.clock.advance(TTL_MS - 1)
    assert house.left() == {"backfill": 1}
    await house.hold(start=4)
    assert house.store.log.end > end
    assert house.store.holds.list_views(house.partition) == (
        HoldView(job="backfill", from_offset=4, ttl_ms=TTL_MS, left_ms=TTL_MS),
    )


async def test_restarted_broker_holds_for_the_ttl_and_no_longer():
    """The hold is in the log; its time counts from the broker's start, whatever the calendar
    says.
    """
    house = HoldingBroker()
    await house.fill()
    await house.hold(start=30)
    house.clock.advance(TTL_MS // 2)
    house.kill()
    house.clock.wall_offset_ms -= 1_000 * HOUR
    assert house.left() == {"backfill": TTL_MS}
    house.clock.wall_offset_ms += 1_000 * HOUR
    await house.cleaning.check()
    assert house.partition.first_offset <= 30
    house.clock.advance(TTL_MS)
    assert house.left() == {}
    await house.cleaning.check()
    assert house.partition.first_offset > 30
    house.kill()
    assert house.left() == {}


async def test_ended_hold_is_not_found_again():
    house = HoldingBroker()
    await house.fill(3)
    await house.hold(start=0)
    await house.hold("other", start=2)
    await house.hold(ttl_ms=0)
    await house.hold("unknown", ttl_ms=0)
    assert house.left() == {"other": TTL_MS}
    house.kill()
    assert house.left() == {"other": TTL_MS}


async def test_hold_is_carried_over_when_its_segment_goes():
    house = HoldingBroker()
    await house.fill(10)
    await house.hold(start=3)
    await house.hold("other", start=19)
    for number in range(10, 200):
        house.clock.advance(HOUR)
        await house.hold("other", start=19)
        await house.desk.append(batch(sequence=2 * number))
    await house.hold(start=3)
    await house.store.carry_over.remove_oldest_segment()
    house.kill()
    assert set(house.left()) == {"other", "backfill"}


async def test_refused_holds_change_nothing():
    house = HoldingBroker()
    await house.fill(2)
    for number in range(HOLDS_PER_PARTITION_MAX):
        await house.hold(f"job-{number}", start=0)
    end, held = house.store.log.end, house.left()
    with pytest.raises(OverloadedError):
        await house.hold("one-more", start=0)
    with pytest.raises(OffsetOutOfRangeError) as refused:
        await house.hold("job-1", start=5)
    assert (refused.value.details["first_offset"], refused.value.details["next_offset"]) == (0, 4)
    with raises(Reason.NAME_INVALID):
        await house.hold("no name!", start=0)
    assert (house.store.log.end, house.left()) == (end, held)
    house.clock.advance(TTL_MS)
    await house.hold("one-more", start=0)
    assert list(house.partition.holds) == ["one-more"]


async def test_removed_messages_cannot_be_held():
    house = HoldingBroker()
    await house.fill()
    await house.cleaning.check()
    with pytest.raises(OffsetOutOfRangeError):
        await house.hold(start=house.partition.first_offset - 1)
    await house.hold(start=house.partition.first_offset)


async def test_hold_is_set_while_messages_are_refused():
    house = HoldingBroker()
    await house.fill(2)
    house.store.commit.refuse_messages("full")
    await house.hold(start=0)  # as a fence, it has room where messages have none
    assert set(house.left()) == {"backfill"}


async def test_image_has_holds_and_an_image_without_them_keeps_its_bytes():
    house = HoldingBroker()
    await house.fill(2)
    before = encode_partition(house.partition)
    await house.hold(start=1)
    held = encode_partition(house.partition)
    assert decode_partition(1, held).holds == house.partition.holds
    parts = [
        decode_partition(1, part)
        for part in encode_partition_parts(house.partition, producers_max=1)
    ]
    assert all(part.holds == house.partition.holds for part in parts)
    await house.hold(ttl_ms=0)
    assert encode_partition(house.partition) == before


async def test_dropped_partition_leaves_nothing_of_its_holds():
    """Subjects come and go, also those whose jobs have ended without an end of their holds."""
    house = HoldingBroker()
    await house.fill(3)
    await house.hold("one", start=0)
    await house.hold("two", start=1)
    await house.hold("one", ttl_ms=0)
    assert house.store.holds.partition_count == 1
    ask = DropPartition(subject=house.partition.facts.subject, last_id=1)
    await drop_partition(house.store, 1, ask, now_ms=house.clock.boot_ms())
    assert house.store.holds.partition_count == 0
