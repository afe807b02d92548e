"""What segments that go said of partitions is written again, however large it is and whatever
damage hides of it.
"""

from __future__ import annotations

import asyncio
import random

import pytest

from keylane.broker.partition.appends import REMEMBERED_BATCHES, ProducerState, StoredBatch
from keylane.broker.partition.damage import describe_damage
from keylane.broker.partition.image import encode_partition, encode_partition_parts
from keylane.broker.partition.partition import LOST_MAX, HostedPartition
from keylane.broker.partition.records import CursorBody, encode_body
from keylane.broker.storage.log.commit_log import segment_path
from keylane.broker.storage.log.trail import trail_path
from keylane.broker.store.carry_over import PRODUCERS_PER_RECORD, STATE_BYTES_MAX
from keylane.broker.store.store import Store
from keylane.protocol.ids import MAX_I64
from keylane.protocol.limits import ACK_RANGES_MAX, PRODUCERS_PER_PARTITION_MAX
from keylane.protocol.record import RECORD_BYTES_MAX
from keylane.testing.machines.disk import SimDisk
from sim.machines.clock import ManualClock
from sim.machines.store import Desk, batch, facts, open_store

SEGMENT = 4096


async def filled(disk: SimDisk, *, segment_bytes: int = SEGMENT) -> Desk:
    """Two partitions, a group on the first one, and several segments of messages."""
    clock = ManualClock()
    desk = Desk(open_store(disk, clock=clock, segment_bytes=segment_bytes), clock)
    for number in (1, 2):
        await desk.host(number)
    await desk.acquire(4)
    for number in range(40):
        for partition_id in (1, 2):
            await desk.append(batch(partition_id=partition_id, sequence=2 * number), partition_id)
    await desk.ack(4, (0, 7), (9, 11))
    return desk


def crowd(partition: HostedPartition, *, base: int = 5_000_000_000) -> None:
    """As many producers as a partition remembers, each with as many batches."""
    rng = random.Random(1)
    for number in range(PRODUCERS_PER_PARTITION_MAX - len(partition.producers)):
        first = base + number
        latest = tuple(
            StoredBatch(first + 300 * index, 300, first + 300 * index, rng.getrandbits(32))
            for index in range(REMEMBERED_BATCHES)
        )
        partition.producers[rng.getrandbits(63)] = ProducerState(3, first + 2400, latest)


def image(store: Store, partition_id: int = 1) -> bytes:
    """All but the first offset, which follows the log; the order of the producers is in it."""
    partition = store.state.partition(partition_id)
    first, partition.first_offset = partition.first_offset, 0
    encoded = encode_partition(partition)
    partition.first_offset = first
    return encoded


def forget_snapshots(disk: SimDisk) -> None:
    for name in disk.list("snapshot"):
        disk.remove(f"snapshot/{name}")


async def go(store: Store, position: int) -> None:
    await store.carry_over.rewrite_described(position)
    await store.carry_over.remove_segments(position)


async def test_partition_with_very_many_producers_survives_its_segments():
    """From the log alone every producer's epoch, next sequence and batches come back, and groups
    and fences too.
    """
    disk = SimDisk()
    desk = await filled(disk)
    store = desk.store
    crowd(store.state.partition(1))
    expected = image(store)
    assert len(expected) > RECORD_BYTES_MAX
    await go(store, store.log.bases[-1])
    forget_snapshots(disk)

    restored = open_store(disk, segment_bytes=SEGMENT)
    assert image(restored) == expected
    assert not describe_damage(restored.state)
    assert restored.state.partition(1).groups["audit"].lock.fence == 4

    # Once more, up to the middle of what was written again: what is left of it alone says too
    # little.
    await go(restored, restored.log.bases[5])
    forget_snapshots(disk)
    again = open_store(disk, segment_bytes=SEGMENT)
    assert image(again) == expected
    assert not describe_damage(again.state)
    assert (await Desk(again, desk.clock).append(batch(sequence=78))).duplicate
    assert (await Desk(again, desk.clock).append(batch(sequence=80))).base_offset == 80


@pytest.mark.parametrize("trail", ["kept", "lost"])
async def test_acks_survive_when_a_large_partition_is_carried_over(trail):
    """Appends that share a commit with a large partition are there after a crash."""
    disk = SimDisk()
    desk = await filled(disk, segment_bytes=1 << 16)
    store = desk.store
    crowd(store.state.partition(1), base=100_000)
    await store.snapshotter.write()
    for number in range(40, 440):
        await desk.append(batch(partition_id=2, sequence=2 * number), 2)
    written = asyncio.create_task(store.carry_over.rewrite_described(store.log.bases[1]))
    while not store.commit._queue:
        await asyncio.sleep(0)
    acked = [desk.append(batch(partition_id=2, sequence=n), 2) for n in range(880, 900, 2)]
    await asyncio.gather(written, *acked)
    disk = disk.disk_after_crash(random.Random(3))
    if trail == "lost":
        for name in disk.list("log"):
            if name.endswith(".trail"):
                disk.remove(f"log/{name}")
    restored = open_store(disk, segment_bytes=1 << 16)
    assert restored.state.partition(2).next_offset == 900
    assert not restored.recovered.cut_bytes
    assert not describe_damage(restored.state)


async def test_damaged_description_is_written_again():
    """Damage took a PARTITION record that its trail gave back: when its segment goes the partition
    stays known.
    """
    disk = SimDisk()
    desk = await filled(disk)
    await desk.store.close()
    disk.contents[segment_path(0)].data[20] ^= 1  # in the header of the first record
    store = open_store(disk, segment_bytes=SEGMENT)
    expected = image(store)
    await go(store, store.log.bases[2])
    await store.close()
    forget_snapshots(disk)
    restored = open_store(disk, segment_bytes=SEGMENT)
    assert not restored.state.orphans
    assert image(restored) == expected


async def test_carry_over_rewrites_all_partitions_when_damage_is_unexplained():
    """Without a trail a damaged segment may have described any partition: none of them is
    forgotten.
    """
    disk = SimDisk()
    desk = await filled(disk)
    store = desk.store
    expected = image(store), image(store, 2)
    disk.contents[segment_path(0)].data[20] ^= 1
    disk.remove(trail_path(0))
    await go(store, store.log.bases[1])
    await store.close()
    forget_snapshots(disk)
    restored = open_store(disk, segment_bytes=SEGMENT)
    assert (image(restored), image(restored, 2)) == expected
    assert not describe_damage(restored.state)


def test_every_record_of_the_largest_partition_fits():
    """With the largest numbers, all losses and all ranges each record is far below what can be
    read.
    """
    partition = HostedPartition(facts(1, subject="s" * 200, broker_group="g" * 200))
    partition.first_offset = partition.next_offset = partition.appended_at_ms = MAX_I64
    for number in range(LOST_MAX):
        start = MAX_I64 - 4 * number
        partition.add_lost_range(start - 2, start, position=MAX_I64)
    stored = StoredBatch(MAX_I64, 1 << 16, MAX_I64, MAX_I64)
    for number in range(PRODUCERS_PER_PARTITION_MAX):
        state = ProducerState((1 << 32) - 1, MAX_I64, (stored,) * REMEMBERED_BATCHES)
        partition.producers[MAX_I64 - number] = state
    parts = list(encode_partition_parts(partition, producers_max=PRODUCERS_PER_RECORD))
    assert len(parts) == PRODUCERS_PER_PARTITION_MAX // PRODUCERS_PER_RECORD
    assert max(map(len, parts)) <= STATE_BYTES_MAX
    ranges = [(MAX_I64 - 4 * n - 2, MAX_I64 - 4 * n) for n in range(ACK_RANGES_MAX)]
    cursor = encode_body(1, CursorBody("c" * 200, MAX_I64, MAX_I64, ranges))
    assert len(cursor) <= RECORD_BYTES_MAX // 2
