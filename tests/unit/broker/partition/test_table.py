"""A partition is the same as an object and as bytes, and there is only one object of it at a
time.
"""

from __future__ import annotations

import gc

import msgspec

from keylane.broker.partition.appends import ProducerState, StoredBatch
from keylane.broker.partition.image import decode_partition, encode_partition
from keylane.broker.partition.partition import HostedPartition, LostOffsets
from keylane.broker.partition.records import CursorBody, FenceBody
from keylane.broker.partition.table import PartitionTable
from keylane.protocol.control import HostPartition, Retention
from keylane.protocol.routing import OrderStrategy, Partition, PartitionState
from sim.machines.store import facts


def full(partition_id: int = 9) -> HostedPartition:
    """A partition with everything in it."""
    partition = HostedPartition(facts(partition_id, parents=(3, 4), queue=7, range_start=5))
    partition.first_offset, partition.next_offset, partition.readable_offset = 2, 90, 90
    partition.appended_at_ms = 1_700_000_000_000
    partition.sealed = partition.ended = True
    for number in (8, 3):
        latest = (StoredBatch(0, 4, 10, 1), StoredBatch(4, 5, 14, 2))
        partition.producers[number] = ProducerState(2, 9, latest)
    partition.apply_fence(FenceBody("audit", 6, "a" * 32))
    partition.groups["audit"].durable_fence = 6
    partition.apply_cursor(CursorBody("audit", 6, 40, [(42, 44), (50, 60)]))
    partition.add_lost_range(20, 25, position=777)
    partition.fences_lost = True
    return partition


def same(partition: HostedPartition, other: HostedPartition) -> bool:
    return encode_partition(partition) == encode_partition(other) and partition.facts == other.facts


def test_image_is_all_of_a_partition():
    """Nothing of a partition is missing in its image, nor changed by it."""
    was = full()
    now = decode_partition(9, encode_partition(was))
    for name in HostedPartition.__slots__:
        if name not in {"__weakref__", "groups"}:
            assert getattr(now, name) == getattr(was, name), name
    before, after = was.groups["audit"], now.groups["audit"]
    assert after.lock == before.lock
    assert (after.acked.cursor, after.acked.ranges) == (40, [(42, 44), (50, 60)])
    assert after.durable_fence == 6
    assert list(now.producers) == [8, 3]
    assert now.lost == (LostOffsets(20, 25, 777),)


_NO_FACTS = {"subject", "partition", "groups", "tokens_above", "times_from_ms"}
"""The first two are made by the test; groups are no fact of a partition."""


def test_image_has_every_fact():
    """Whatever is told of a partition is in its image, also what has been added to the facts
    since.
    """
    values = {
        OrderStrategy | None: OrderStrategy.STRICT,
        Retention | None: Retention.TIME,
        bool: True,
        str: "h",
    }
    given = {}
    for field in msgspec.structs.fields(HostPartition):
        if field.name not in _NO_FACTS:
            given[field.name] = values.get(field.type, 3)
    told = HostPartition(subject="s", partition=facts(1).partition, **given)
    assert decode_partition(1, encode_partition(HostedPartition(told))).facts == told
    own = {"partition_id", "name", "queue", "range_start", "range_end", "broker_group", "parents"}
    changing = {"state", "address", "logic_start"}
    assert set(Partition.__struct_fields__) == own | changing
    assert told.partition.state is PartitionState.OPEN


def test_million_partitions_are_a_few_objects():
    """Beyond the limit the oldest are kept as bytes, and every one is found as it was."""
    table = PartitionTable(warm_max=10)
    for number in range(1, 200):
        table.add(full(number))
    assert len(table.warm) <= 11
    assert len(table) == len(list(table)) == 199
    for number in range(1, 200):
        assert same(table[number], full(number))
        assert number in table
    assert len(table.warm) <= 11
    assert table.get(200) is None
    assert 200 not in table


def test_cooled_partition_is_the_same_object_while_it_is_referenced():
    """A partition that cooled while it was in use is the same object when it is asked for again."""
    table = PartitionTable(warm_max=2)
    held = full(1)
    table.add(held)
    for number in range(2, 20):
        table.add(full(number))
    assert 1 not in table.warm
    assert table[1] is held
    del held
    for number in range(2, 20):
        assert table[number]
    gc.collect()
    assert same(table[1], full(1))


def test_partition_stays_warm_while_work_on_it_is_under_way():
    """A lock that is held, an append or a fence on its way to the disk keep a partition as it
    is.
    """
    table = PartitionTable(lambda: 100, warm_max=1)
    locked, appending, fencing, sealing = (full(number) for number in (1, 2, 3, 4))
    locked.groups["audit"].lock.expires_at_ms = 101
    appending.next_offset += 1
    fencing.groups["audit"].lock.fence += 1
    sealing.ended = False
    for partition in (locked, appending, fencing, sealing):
        table.add(partition)
    for number in range(5, 40):
        table.add(full(number))
    for partition in (locked, appending, fencing, sealing):
        assert table.warm[partition.partition_id] is partition


def test_new_partition_is_taken_back_wherever_it_is():
    """A partition that could not be made durable is gone, whether it has cooled or not."""
    table = PartitionTable(warm_max=1)
    for number in (1, 2, 3):
        table.add(HostedPartition(facts(number)))
    for number in (3, 1, 2):
        table.remove(number)
        assert number not in table
    assert len(table) == 0
