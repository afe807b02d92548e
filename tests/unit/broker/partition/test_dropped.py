"""Ids of dropped partitions over years of subjects that come and go."""

from __future__ import annotations

from collections.abc import Iterable

from keylane.broker.partition import dropped as module
from keylane.broker.partition.dropped import RANGES_KEPT, DroppedPartitions
from keylane.broker.partition.records import DroppedBody


def drop(partitions: DroppedPartitions, *ids: int) -> None:
    for each in ids:
        partitions.add(DroppedBody([(each, each + 1)], {f"s{each}": each}))


def ranges(partitions: DroppedPartitions) -> list[tuple[int, int]]:
    return [each for body in partitions.record_bodies() for each in body.ranges]


def join(partitions: DroppedPartitions, others: Iterable[int], *, late: Iterable[int] = ()) -> None:
    """As a snapshot does; `late` are partitions that came while it looked at the others."""
    joining = partitions.begin_merge()
    joining.keep_apart(others)
    partitions.merge_ranges(joining, late)


def test_dropped_ids_are_bounded_when_ids_between_them_are_of_other_brokers():
    """Each second id is dropped here, for ever: the ranges, and the records of them, had no
    limit.
    """
    partitions = DroppedPartitions()
    every = range(1, 6 * RANGES_KEPT, 2)
    for each in every:
        drop(partitions, each)
        if partitions.needs_merge:
            join(partitions, [])
    assert len(ranges(partitions)) <= RANGES_KEPT
    assert all(each in partitions for each in every)
    assert partitions.highest_id == every[-1]
    assert 2 in partitions  # between old ones: a call to host it is refused
    assert every[-1] - 1 not in partitions
    assert every[-1] + 1 not in partitions


def test_dropped_ids_stay_apart_when_a_partition_between_them_is_there_or_may_be_again(monkeypatch):
    """A partition that is hosted, or whose drop may be undone, is never taken for dropped."""
    monkeypatch.setattr(module, "RANGES_KEPT", 4)
    partitions = DroppedPartitions()
    drop(partitions, *range(10, 50, 4))
    partitions.add_pending(20, DroppedBody([(20, 21)], {}))
    assert partitions.needs_merge
    join(partitions, [31, 3, 60])
    partitions.remove_pending(20)
    assert ranges(partitions) == [(10, 19), (22, 31), (34, 39), (42, 43), (46, 47)]
    assert not [each for each in (3, 20, 31, 44, 60) if each in partitions]
    assert not partitions.needs_merge


def test_dropped_ids_are_joined_again_only_when_there_are_many_new_ones(monkeypatch):
    """A broker of a million partitions does not look at all of them with each snapshot."""
    monkeypatch.setattr(module, "RANGES_KEPT", 4)
    partitions = DroppedPartitions()
    between = list(range(11, 90, 4))
    drop(partitions, *range(10, 90, 4))
    join(partitions, between)
    assert len(ranges(partitions)) == 20
    drop(partitions, 100, 104)
    assert not partitions.needs_merge
    drop(partitions, 108)
    assert partitions.needs_merge


def test_dropped_ids_stay_apart_when_partitions_come_or_go_while_they_are_joined(monkeypatch):
    """A snapshot looks at a million partitions in portions, and calls come between."""
    monkeypatch.setattr(module, "RANGES_KEPT", 4)
    partitions = DroppedPartitions()
    drop(partitions, *range(10, 50, 4))
    joining = partitions.begin_merge()
    joining.keep_apart([31])
    drop(partitions, 16, 36, 100)
    partitions.add_pending(24, DroppedBody([(24, 25)], {}))
    partitions.merge_ranges(joining, [20])
    partitions.remove_pending(24)
    assert ranges(partitions) == [
        (10, 19),
        (22, 23),
        (26, 31),
        (34, 39),
        (42, 43),
        (46, 47),
        (100, 101),
    ]
    assert not [each for each in (20, 24, 31, 44, 99) if each in partitions]
