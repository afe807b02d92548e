"""Damage as people are told of it, and as the state keeps it: joined, bounded, and never more than
was lost.
"""

from __future__ import annotations

import asyncio
import gc
import random

import pytest

from keylane.broker.partition.damage import describe_damage
from keylane.broker.partition.image import encode_partition
from keylane.broker.partition.partition import LOST_MAX, HostedPartition, LostOffsets
from keylane.broker.partition.state import MORE, BrokerState
from keylane.broker.storage.log import recovery
from keylane.broker.storage.log.commit_log import segment_path
from keylane.broker.storage.log.holes import Hole
from keylane.broker.store.replay import HOLES_MAX, Replay
from keylane.protocol.errors import CorruptLogError
from keylane.testing.machines.disk import SimDisk
from sim.machines.clock import ManualClock
from sim.machines.store import Desk, batch, facts, open_store


def test_losses_side_by_side_are_one():
    """A hundred thousand lost batches one behind the other are one range, at the first one's
    position.
    """
    partition = HostedPartition(facts(1))
    for number in range(100_000):
        partition.add_lost_range(2 * number, 2 * number + 2, position=500 + number)
    assert partition.lost == (LostOffsets(0, 200_000, 500),)


def test_ranges_are_what_was_lost():
    """In any order, overlapping or not, the ranges cover the lost offsets and no other."""
    rng = random.Random(5)
    for _ in range(200):
        partition = HostedPartition(facts(1))
        lost: set[int] = set()
        for _ in range(rng.randrange(1, 30)):
            start = rng.randrange(100)
            end = start + rng.randrange(1, 9)
            partition.add_lost_range(start, end, position=1)
            lost |= set(range(start, end))
        assert {
            n for lost_range in partition.lost for n in range(lost_range.start, lost_range.end)
        } == lost
        ends = [edge for lost_range in partition.lost for edge in lost_range[:2]]
        assert ends == sorted(set(ends))


def test_very_many_losses_are_few_bytes():
    """Ranges beyond the limit are left out, never joined over good messages; an unknown end is
    always kept.
    """
    partition = HostedPartition(facts(1))
    partition.add_lost_range(90_000, -1, position=9)
    for number in range(20_000):
        partition.add_lost_range(4 * number, 4 * number + 2, position=number)
    assert len(partition.lost) == LOST_MAX
    assert all(lost_range.end - lost_range.start == 2 for lost_range in partition.lost[:-1])
    assert partition.lost[-1] == LostOffsets(90_000, -1, 9)
    assert len(encode_partition(partition)) < 64 << 10


def test_many_holes_hide_nothing_else():
    """However many holes and damaged partitions there are, other problems are seen, and what is
    left out is counted.
    """
    state = BrokerState()
    replay = Replay(state)
    for number in range(1, 151):
        partition = state.host(facts(number))
        for start in range(0, 40, 4):
            state.add_lost_range(partition, start, start + 2, position=number)
    for number in range(10_000):
        replay.on_hole(Hole(start=20 * number, end=20 * number + 10, reason="r", explained=True))
    state.add_problem("the one that matters")
    told = describe_damage(state)
    assert "the one that matters" in told
    assert MORE in told
    assert len(told) < 200
    assert sum(text.startswith("the log is damaged") for text in told) == HOLES_MAX
    assert "partition 1 has lost 20 messages in 10 ranges" in "\n".join(told)
    assert told[-1] == "50 more partitions have lost messages"


def filled(count: int, **settings) -> SimDisk:
    disk, clock = SimDisk(), ManualClock()

    async def fill() -> None:
        desk = Desk(open_store(disk, clock=clock, **settings), clock)
        for partition_id in (1, 2):
            await desk.host(partition_id)
        for number in range(count):
            partition_id = 1 + number % 2
            await desk.append(
                batch(sequence=number // 2 * 2, partition_id=partition_id), partition_id
            )

    asyncio.run(fill())
    return disk


def test_large_hole_is_told_in_parts(monkeypatch):
    """A lost segment is told a few records at a time, and comes to one range for each partition."""
    monkeypatch.setattr(recovery, "LOST_RECORDS_MAX", 10)
    disk = filled(200, segment_bytes=8_000)
    disk.contents[segment_path(0)].data[:] = bytes(8_000)
    disk.contents[segment_path(0)].sync()
    store = open_store(disk)
    for partition_id in (1, 2):
        partition = store.state.partition(partition_id)
        (lost,) = partition.lost
        assert lost.start == 0
        assert partition.next_offset == 200
    told = describe_damage(store.state)
    assert len(told) == 3, told


@pytest.mark.parametrize("kind", ["file", "rocksdb"])
async def test_damage_met_by_a_read_is_told_and_stays(kind, tmp_path):
    """Bytes that rot while the broker runs: the read fails, the partition stops as after a start,
    others go on.
    """
    from keylane.broker.storage.files import RealFiles

    files = RealFiles(tmp_path / "data")
    files.lock()
    clock = ManualClock()
    desk = Desk(open_store(files, clock=clock, index=kind, cache_bytes=0), clock)
    for partition_id in (1, 2):
        await desk.host(partition_id)
        for number in range(5):
            await desk.append(batch(sequence=2 * number, partition_id=partition_id), partition_id)
    path = tmp_path / "data" / segment_path(0)
    data = bytearray(path.read_bytes())
    data[data.index(b"value 6")] ^= 1
    path.write_bytes(data)
    for _ in range(3):
        with pytest.raises(CorruptLogError):
            await desk.read(6)
    (told,) = describe_damage(desk.store.state)
    assert told.startswith("partition 1 has lost its offsets from 6 to 8 (position ")
    with pytest.raises(CorruptLogError, match="takes no messages"):
        await desk.append(batch(sequence=10))
    await desk.append(batch(sequence=10, partition_id=2), 2)
    answer, _ = await desk.read(0)
    assert answer.upto == 6
    answer, _ = await desk.read(8)
    assert answer.upto == 10
    await desk.store.close()
    again = open_store(files, clock=clock, index=kind)
    assert describe_damage(again.state) == [told]
    await again.close()
    files.close()


async def test_damage_met_by_a_slow_read_stays_though_the_partition_cooled():
    """While the disk is read the partition may be packed away: what the read finds is kept all the
    same.
    """
    disk, clock = SimDisk(), ManualClock()
    store = open_store(disk, clock=clock, cache_bytes=0)
    desk = Desk(store, clock)
    table = store.state.partitions
    for partition_id in (1, 2, 3):
        await desk.host(partition_id)
    await desk.append(batch())
    log = disk.contents[segment_path(0)].data
    log[log.index(b"value 0")] ^= 1
    turn = asyncio.Event()

    async def slow(function, /, *args):
        await turn.wait()
        return function(*args)

    async def read() -> str:
        try:
            await desk.read(0)
        except CorruptLogError as error:
            return error.message
        return ""

    store.run_read = slow
    reading = asyncio.create_task(read())
    await asyncio.sleep(0)
    table._warm_max = 1
    for partition_id in (2, 3) * 3:
        table.remove(partition_id)
        table.add(HostedPartition(facts(partition_id)))
    assert 1 in table._cold_images
    turn.set()
    assert "is damaged" in await reading
    del reading
    gc.collect()  # no reference is left
    assert table[1].lost == (LostOffsets(0, 2, table[1].lost[0].position),)
    with pytest.raises(CorruptLogError, match="takes no messages"):
        await desk.append(batch(sequence=2))
