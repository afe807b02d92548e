"""Removing the oldest segments removes their messages only: everything else is restored from the
log alone.
"""

from __future__ import annotations

import asyncio
import copy
import random

import pytest

from keylane.broker.partition.image import encode_partition
from keylane.broker.storage.log.commit_log import segment_bases, segment_path
from keylane.broker.storage.reserve import ensure_reserve, release_reserve
from keylane.broker.store.group_commit import RETRY_FULL_MS
from keylane.protocol.errors import OffsetOutOfRangeError, StorageError
from keylane.testing.machines.disk import SimDisk
from sim.machines.clock import ManualClock
from sim.machines.store import Desk, batch, open_store

SEGMENT = 4096


async def filled(disk: SimDisk, clock: ManualClock) -> Desk:
    desk = Desk(open_store(disk, clock=clock, segment_bytes=SEGMENT), clock)
    for number in (1, 2, 3):
        await desk.host(number)
    await desk.acquire(4)
    for number in range(30):
        for partition_id in (1, 2):
            data = batch(partition_id=partition_id, sequence=5 * number, count=5)
            await desk.append(data, partition_id)
    await desk.ack(4, (0, 7), (9, 11))
    _, durable = desk.store.seal(2)
    await durable
    return desk


def images(store) -> dict[int, bytes]:
    """All but the first offsets, which follow the log."""
    taken = {}
    for number, partition in store.state.partitions.items():
        first, partition.first_offset = partition.first_offset, 0
        taken[number] = encode_partition(partition)
        partition.first_offset = first
    return taken


@pytest.mark.parametrize("snapshot", ["kept", "deleted", "older"])
async def test_partitions_keep_their_state_when_their_segments_are_removed(snapshot):
    """The removal of segments changes no fence, cursor, sequence, seal or offset."""
    disk, clock = SimDisk(), ManualClock()
    desk = await filled(disk, clock)
    older = {name: bytes(disk.contents[f"snapshot/{name}"].data) for name in disk.list("snapshot")}
    while len(desk.store.log.bases) > 1:
        await desk.store.carry_over.remove_oldest_segment()
    expected = images(desk.store)
    for name in disk.list("snapshot"):
        if snapshot == "deleted" or (snapshot == "older" and name not in older):
            disk.remove(f"snapshot/{name}")

    reopened = open_store(disk, clock=clock, segment_bytes=SEGMENT)
    assert images(reopened) == expected
    assert not reopened.state.problems
    assert segment_bases(disk)[0] > 0
    again = Desk(reopened, clock)
    assert (await again.append(batch(sequence=145, count=5))).duplicate
    assert (await again.append(batch(sequence=150, count=5))).base_offset == 150
    first = reopened.state.partition(1).first_offset
    assert first > 0
    with pytest.raises(OffsetOutOfRangeError):
        await again.read(first - 1)
    assert (await again.read(first))[0].upto > first


async def test_large_partitions_are_written_in_parts(monkeypatch):
    """A partition too large for one record is written as several."""
    monkeypatch.setattr("keylane.broker.store.carry_over.STATE_BYTES_MAX", 100)
    await test_partitions_keep_their_state_when_their_segments_are_removed("deleted")


def test_crash_while_a_segment_is_removed_changes_no_state():
    """At every operation of the removal a crash leaves the same state, and the removal can be done
    again.
    """

    def attempt(crash_at: int | None) -> tuple[SimDisk, int, dict[int, bytes]]:
        disk, clock = SimDisk(), ManualClock()
        loop = asyncio.new_event_loop()
        loop.set_exception_handler(lambda _loop, _context: None)
        try:
            desk = loop.run_until_complete(filled(disk, clock))
            expected = images(desk.store)
            before = disk.steps
            disk.crash_at = None if crash_at is None else before + crash_at
            try:
                loop.run_until_complete(desk.store.carry_over.remove_oldest_segment())
            except SystemExit:
                pass
            for task in asyncio.all_tasks(loop):
                task.cancel()
            return disk, disk.steps - before, expected
        finally:
            loop.close()

    _, steps, _ = attempt(None)
    assert steps > 5
    for crash_at in range(1, steps + 1):
        disk, _, expected = attempt(crash_at)
        reopened = open_store(disk.disk_after_crash(random.Random(crash_at)), segment_bytes=SEGMENT)
        assert images(reopened) == expected
        assert not reopened.state.problems


async def test_segment_stays_while_a_full_disk_takes_no_copy_of_its_facts():
    """A segment whose facts cannot be written again stays; once the reserve is given up they are
    written and it goes.
    """
    disk, clock = SimDisk(), ManualClock()
    desk = await filled(disk, clock)
    bases = segment_bases(disk)
    ensure_reserve(disk)
    disk.free_space = 10
    with pytest.raises(StorageError):
        await desk.store.carry_over.remove_oldest_segment()
    assert segment_bases(disk) == bases
    assert disk.size(segment_path(bases[0]))
    assert copy.copy(desk.store.log.bases) == bases
    assert release_reserve(disk)
    clock.advance(RETRY_FULL_MS)
    assert await desk.store.carry_over.remove_oldest_segment() == bases[1]
    assert images(open_store(disk, segment_bytes=SEGMENT)) == images(desk.store)
