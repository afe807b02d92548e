"""Planning: pinned half-open ranges, one per physical partition, and what cannot be planned."""

from __future__ import annotations

import pytest

from keylane.arrow.planner import depths, plan_ranges, select_partitions
from keylane.arrow.selection import EARLIEST, LATEST, Edge, ReadBound, ReadOptions
from keylane.protocol.control import PartitionStatus
from keylane.protocol.errors import NotSentError, OffsetOutOfRangeError, PartitionUnknownError
from keylane.protocol.routing import OrderStrategy, Partition, PartitionState, Route


def partition(
    number: int,
    state: str = "open",
    address: str | None = "127.0.0.1:1",
    parents: tuple[int, ...] = (),
) -> Partition:
    return Partition(
        partition_id=number,
        name=f"p{number}",
        queue=0,
        range_start=0,
        range_end=1024,
        broker_group=f"g{number}",
        state=PartitionState(state),
        address=address,
        parents=parents,
        logic_start=100 * number,
    )


def route(*partitions: Partition) -> Route:
    return Route(
        subject="flights", version=1, order_strategy=OrderStrategy.STRICT, partitions=partitions
    )


def status(number: int, first: int, after: int) -> PartitionStatus:
    return PartitionStatus(
        partition_id=number,
        subject="flights",
        name=f"p{number}",
        state=PartitionState.OPEN,
        first_offset=first,
        next_offset=after,
    )


def options(**more) -> ReadOptions:
    return ReadOptions(meta=("127.0.0.1:1",), subjects=("flights",), **more)


def starts(**offsets: int) -> ReadBound:
    return ReadBound(Edge.EARLIEST, {int(name[1:]): offset for name, offset in offsets.items()})


def ends(**offsets: int) -> ReadBound:
    return ReadBound(Edge.LATEST, {int(name[1:]): offset for name, offset in offsets.items()})


def planned(chosen: ReadOptions) -> dict[int, tuple[int, int]]:
    """Two partitions: 3 holds [5, 20), 4 holds [0, 0)."""
    table = route(partition(4), partition(3, "sealed"))
    parts = select_partitions(table, chosen)
    ranges = plan_ranges(table, parts, {3: status(3, 5, 20), 4: status(4, 0, 0)}, chosen)
    return {range_.partition_id: (range_.start, range_.end) for range_ in ranges}


@pytest.mark.parametrize(
    ("chosen", "ranges"),
    [
        ({}, {3: (5, 20), 4: (0, 0)}),
        ({"start": LATEST}, {3: (20, 20), 4: (0, 0)}),
        ({"end": EARLIEST}, {3: (5, 5), 4: (0, 0)}),
        ({"start": starts(p3=7)}, {3: (7, 20), 4: (0, 0)}),
        ({"start": starts(p3=7), "end": ends(p3=9)}, {3: (7, 9), 4: (0, 0)}),
        ({"start": starts(p3=5, p4=0), "end": ends(p3=20, p4=0)}, {3: (5, 20), 4: (0, 0)}),
        ({"start": starts(p3=9), "end": ends(p3=9)}, {3: (9, 9), 4: (0, 0)}),
        ({"partitions": frozenset({4})}, {4: (0, 0)}),
        ({"partitions": frozenset({3}), "end": ends(p3=6)}, {3: (5, 6)}),
    ],
    ids=str,
)
def test_each_partition_has_one_pinned_range(chosen, ranges):
    """Every physical partition gets one half-open range of numbers, by id, empty ones too."""
    plan = planned(options(**chosen))
    assert plan == ranges
    assert list(plan) == sorted(plan)


@pytest.mark.parametrize(
    ("chosen", "details"),
    [
        (
            {"start": starts(p3=4)},
            {"partition_id": 3, "offset": 4, "first_offset": 5, "next_offset": 20},
        ),
        (
            {"start": starts(p3=21)},
            {"partition_id": 3, "offset": 21, "first_offset": 5, "next_offset": 20},
        ),
        (
            {"end": ends(p3=21)},
            {"partition_id": 3, "offset": 21, "first_offset": 5, "next_offset": 20},
        ),
        (
            {"end": ends(p4=1)},
            {"partition_id": 4, "offset": 1, "first_offset": 0, "next_offset": 0},
        ),
        (
            {"start": starts(p3=9), "end": ends(p3=8)},
            {"partition_id": 3, "offset": 9, "first_offset": 5, "next_offset": 8},
        ),
        (
            {"start": LATEST, "end": EARLIEST},
            {"partition_id": 3, "offset": 20, "first_offset": 5, "next_offset": 5},
        ),
    ],
    ids=str,
)
def test_offset_that_is_not_there_is_refused(chosen, details):
    """A range asked for by number is read whole or refused, with the numbers it could have had."""
    with pytest.raises(OffsetOutOfRangeError) as caught:
        planned(options(**chosen))
    assert caught.value.details == details


@pytest.mark.parametrize(
    "chosen",
    [{"partitions": frozenset({3, 9})}, {"start": starts(p9=0)}, {"end": ends(p9=0)}],
    ids=str,
)
def test_unknown_partition_is_refused(chosen):
    """A partition that the subject has not is a typed error that names it."""
    with pytest.raises(PartitionUnknownError) as caught:
        planned(options(**chosen))
    assert caught.value.details == {"partition_id": 9, "subject": "flights"}


def test_partitions_without_data_are_left_out():
    """Planned and expired partitions are not read, sealed ones are."""
    table = route(
        *(partition(n, s) for n, s in enumerate(["planned", "open", "sealed", "expired"], 1))
    )
    assert [partition.partition_id for partition in select_partitions(table, options())] == [2, 3]
    with pytest.raises(PartitionUnknownError):
        select_partitions(table, options(partitions=frozenset({4})))


def test_subject_without_partitions_plans_nothing():
    """No partitions, no ranges, no error."""
    assert select_partitions(route(), options()) == []
    assert plan_ranges(route(), [], {}, options()) == []


def test_partition_whose_broker_is_away_is_told_at_planning():
    """Reading part of a subject in silence is worse than not reading it."""
    with pytest.raises(NotSentError, match="broker group g3 is not available"):
        select_partitions(route(partition(3, address=None), partition(4)), options())
    left = select_partitions(
        route(partition(3, address=None), partition(4)), options(partitions=frozenset({4}))
    )
    assert [partition.partition_id for partition in left] == [4]


def test_partition_no_broker_knows_is_told_at_planning():
    """A partition of the route that its broker does not host is a typed error."""
    with pytest.raises(PartitionUnknownError):
        plan_ranges(route(partition(3)), [partition(3)], {}, options())


def test_range_says_where_its_partition_is_in_queue_and_lineage():
    """Subject, logic queue and its start, and the depth below all the parents that the route knows."""
    table = route(
        partition(2),
        partition(7, "sealed", parents=(5,)),
        partition(8, parents=(2, 7)),
        partition(5, "sealed", parents=(1,)),
    )
    assert depths(table) == {2: 0, 5: 0, 7: 1, 8: 2}
    parts = select_partitions(table, options())
    ranges = plan_ranges(table, parts, {n: status(n, 0, 1) for n in (2, 5, 7, 8)}, options())
    assert [(each.subject, each.queue, each.logic_start, each.epoch) for each in ranges] == [
        ("flights", 0, 200, 0),
        ("flights", 0, 500, 0),
        ("flights", 0, 700, 1),
        ("flights", 0, 800, 2),
    ]
