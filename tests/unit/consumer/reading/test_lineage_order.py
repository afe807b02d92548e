"""Which partitions may be read, according to their lineage."""

from __future__ import annotations

from keylane.admin import Partition, PartitionState
from keylane.consumer.reading.lineage_order import LineageOrder
from keylane.protocol.operations import PartitionHistory
from keylane.protocol.routing import logical_partition

OPEN, SEALED = PartitionState.OPEN, PartitionState.SEALED


def past(number, low, high, *parents, state=SEALED, lost=False) -> PartitionHistory:
    partition = Partition(
        partition_id=number,
        name=f"p{number}",
        queue=0,
        range_start=low,
        range_end=high,
        broker_group="g1",
        state=state,
        parents=parents,
    )
    return PartitionHistory(partition=partition, lost=lost)


GROWN = [past(1, 0, 1024), past(2, 0, 512, 1, state=OPEN), past(3, 512, 1024, 1, state=OPEN)]


def ids(order: LineageOrder) -> list[int]:
    return [int(entry.partition.partition_id) for entry in order.readable()]


def test_children_are_readable_when_all_parents_are_finished():
    order = LineageOrder()
    order.update([*GROWN, past(4, 0, 1024, 2, 3, state=OPEN)])
    assert ids(order) == [1]
    order.finish(1)
    assert ids(order) == [2, 3]
    order.finish(3)
    assert ids(order) == [2]
    order.finish(2)
    assert ids(order) == [4]
    assert not order.lacks_children
    order.finish(4)
    assert (ids(order), order.unread_ids, order.lacks_children) == ([], frozenset(), True)


def test_key_has_only_the_partitions_of_its_range():
    key = b"customer-7"
    order = LineageOrder(key=key)
    order.update(GROWN)
    child = 2 if logical_partition(key) < 512 else 3
    assert order.unread_ids == {1, child}
    order.finish(1)
    assert (ids(order), order.lacks_children) == ([child], False)


def test_children_are_learnt_later():
    order = LineageOrder()
    order.update(GROWN[:1])
    order.finish(1)
    assert order.lacks_children
    planned = past(2, 0, 1024, 1, state=PartitionState.PLANNED)
    assert order.update([GROWN[0], planned]) == []
    assert order.lacks_children
    order.update([GROWN[0], past(2, 0, 1024, 1, state=OPEN)])
    assert (ids(order), order.lacks_children) == ([2], False)


def test_partition_of_its_own_has_no_children():
    order = LineageOrder(partition=1)
    order.update(GROWN)
    assert ids(order) == [1]
    order.finish(1)
    assert not order.lacks_children


def test_partitions_whose_data_is_gone_hold_up_none():
    gone = [past(1, 0, 512, state=PartitionState.EXPIRED), past(2, 512, 1024, lost=True)]
    order = LineageOrder()
    assert order.update([*gone, past(3, 0, 1024, 1, 2, state=OPEN)]) == gone
    assert order.update(gone) == []
    assert ids(order) == [3]


def test_partition_waits_for_what_an_empty_or_lost_one_continues():
    """Otherwise earlier messages of a key would come after those sent after the empty partition."""
    order = LineageOrder()
    chain = [past(1, 0, 1024), past(2, 0, 1024, 1), past(3, 0, 1024, 2, lost=True)]
    order.update([*chain, past(4, 0, 512, 3), past(5, 512, 1024, 3), past(6, 512, 1024, 5)])
    order.finish(2)  # nothing is stored in it
    order.finish(5)
    assert ids(order) == [1]
    order.finish(1)
    assert ids(order) == [4, 6]
