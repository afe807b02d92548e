"""The oldest partition with data of each logical partition: all are covered, whatever has expired."""

from __future__ import annotations

import pytest

from keylane.protocol.errors import StaleRouteError
from keylane.protocol.routing import Partition, PartitionState
from keylane.spark.writing.shares import oldest_shares

OPEN, SEALED, EXPIRED = PartitionState.OPEN, PartitionState.SEALED, PartitionState.EXPIRED


def partition(number: int, start: int, end: int, state: PartitionState = SEALED) -> Partition:
    return Partition(
        partition_id=number,  # type: ignore[arg-type]
        name=f"s.p{number}",  # type: ignore[arg-type]
        queue=number,  # type: ignore[arg-type]
        range_start=start,
        range_end=end,
        broker_group="g",  # type: ignore[arg-type]
        state=state,
    )


def shares(*partitions: Partition, bounds=(0, 1024), behind: int = 0) -> list[tuple[int, int, int]]:
    chosen = oldest_shares(partitions, bounds, behind=behind)
    return [(int(each.partition.partition_id), each.start, each.end) for each in chosen]


MERGED = partition(4, 0, 1024, OPEN)


def test_shares_are_of_the_parents_while_they_have_data():
    parents = partition(1, 0, 512), partition(2, 512, 1024)
    assert shares(MERGED, *parents) == [(1, 0, 512), (2, 512, 1024)]
    assert shares(MERGED, *parents, bounds=(512, 1024), behind=2) == [(4, 512, 1024)]


def test_shares_of_an_expired_parent_are_its_childs():
    left = partition(2, 300, 600)
    gone = partition(1, 0, 300, EXPIRED)
    assert shares(left, gone, MERGED) == [(4, 0, 300), (2, 300, 600), (4, 600, 1024)]


def test_shares_pass_over_a_child_that_is_gone_to_what_continues_it():
    """Of a disk whose loss was accepted nothing is left, while what it continued still has its messages."""
    parent, sibling = partition(1, 0, 1024), partition(3, 512, 1024, OPEN)
    anew = partition(5, 0, 512, OPEN)
    assert shares(parent, sibling, anew, behind=1) == [(5, 0, 512), (3, 512, 1024)]


def test_shares_are_refused_while_the_route_lacks_a_logical_partition():
    with pytest.raises(StaleRouteError):
        shares(partition(1, 0, 1024), partition(3, 512, 1024, OPEN), behind=1)
