"""The route table, and the exact split for every number of partitions."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest

from keylane.protocol.errors import InvalidRequestError
from keylane.protocol.limits import LOGICAL_PARTITIONS, PARTITIONS_MAX
from keylane.protocol.routing import (
    OrderStrategy,
    Partition,
    PartitionState,
    Route,
    logical_partition,
    route_table,
    split_ranges,
)


def partition(number: int, start: int, end: int, state: PartitionState = PartitionState.OPEN):
    return Partition(
        partition_id=number,
        name=f"p{number}",
        queue=number - 1,
        range_start=start,
        range_end=end,
        broker_group="g0",
        state=state,
    )


def route(*partitions: Partition) -> Route:
    return Route(subject="s", version=1, order_strategy=OrderStrategy.STRICT, partitions=partitions)


def test_split_is_exact_for_every_number_of_partitions():
    """For every k in 1..1024 the ranges cover [0, 1024) without gap or overlap and differ by at
    most one.
    """
    for count in range(1, PARTITIONS_MAX + 1):
        ranges = split_ranges(count)
        assert len(ranges) == count
        assert ranges[0][0] == 0
        assert ranges[-1][1] == LOGICAL_PARTITIONS
        assert all(end == start for (_, end), (start, _) in pairwise(ranges))
        sizes = [end - start for start, end in ranges]
        assert min(sizes) >= 1
        assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("count", [-1, 0, 1025, 10**9])
def test_no_other_number_of_partitions_is_split(count):
    """A subject has 1 to 1024 partitions."""
    with pytest.raises(InvalidRequestError):
        split_ranges(count)


@pytest.mark.parametrize("count", [1, 2, 3, 7, 1000, 1024])
def test_table_sends_each_logical_partition_to_its_range(count):
    """The table names, for each logical partition, the OPEN partition whose range holds it."""
    parts = [partition(n + 1, a, b) for n, (a, b) in enumerate(split_ranges(count))]
    table = route_table(route(*reversed(parts)))
    assert len(table) == LOGICAL_PARTITIONS
    assert all(
        partition.range_start <= number < partition.range_end
        for number, partition in enumerate(table)
    )


def test_sealed_planned_and_expired_partitions_take_nothing():
    """Only OPEN partitions are in the table."""
    old = [
        partition(number, 0, 1024, state)
        for number, state in enumerate(
            [PartitionState.SEALED, PartitionState.PLANNED, PartitionState.EXPIRED], 1
        )
    ]
    table = route_table(route(*old, partition(9, 0, 1024)))
    assert {partition.partition_id for partition in table} == {9}


@pytest.mark.parametrize(
    ("ranges", "text"),
    [
        ([(0, 1023)], "logical partition 1023 has no open partition"),
        ([(0, 500), (501, 1024)], "logical partition 500 has no open partition"),
        ([(0, 501), (500, 1024)], "logical partition 500 has two open partitions"),
        ([], "logical partition 0 has no open partition"),
        ([(0, 1025)], "not a range"),
        ([(-1, 1024)], "not a range"),
        ([(0, 1024), (5, 5)], "not a range"),
        ([(0, 1024), (9, 5)], "not a range"),
    ],
)
def test_route_that_is_not_exact_is_refused(ranges, text):
    """A route with a gap, an overlap or an impossible range is a typed error, never a wrong
    table.
    """
    with pytest.raises(InvalidRequestError, match=text):
        route_table(route(*(partition(n + 1, a, b) for n, (a, b) in enumerate(ranges))))


def test_keys_spread_evenly():
    """100,000 keys hit every logical partition, none more than twice as often as the mean."""
    hits = Counter(logical_partition(b"key-%d" % number) for number in range(100_000))
    assert len(hits) == LOGICAL_PARTITIONS
    assert max(hits.values()) < 2 * 100_000 / LOGICAL_PARTITIONS
