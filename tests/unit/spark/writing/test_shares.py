"""The oldest partition with data of each logical partition: all are covered, whatever has
expired.
"""

from __future__ import annotations

import random

import msgspec
import pytest

from keylane.protocol.errors import StaleRouteError
from keylane.protocol.routing import Partition, PartitionState, split_ranges
from keylane.spark.writing.shares import KnownRanges, oldest_shares

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


def shares(
    *partitions: Partition, bounds=(0, 1024), after_id: int = 0
) -> list[tuple[int, int, int]]:
    past = KnownRanges()
    past.add(partitions)
    chosen = oldest_shares(partitions, bounds, known_ranges=past, after_id=after_id)
    return [(int(each.partition.partition_id), each.start, each.end) for each in chosen]


MERGED = partition(4, 0, 1024, OPEN)


def test_shares_are_of_the_parents_while_they_have_data():
    parents = partition(1, 0, 512), partition(2, 512, 1024)
    assert shares(MERGED, *parents) == [(1, 0, 512), (2, 512, 1024)]
    assert shares(MERGED, *parents, bounds=(512, 1024), after_id=2) == [(4, 512, 1024)]


def test_shares_of_an_expired_parent_are_its_childs():
    left = partition(2, 300, 600)
    gone = partition(1, 0, 300, EXPIRED)
    assert shares(left, gone, MERGED) == [(4, 0, 300), (2, 300, 600), (4, 600, 1024)]


def test_shares_end_where_ranges_of_expired_partitions_end():
    gone = partition(1, 0, 300, EXPIRED), partition(2, 300, 1024, EXPIRED)
    planned = partition(5, 0, 100, PartitionState.PLANNED)
    assert shares(MERGED, *gone, planned) == [(4, 0, 300), (4, 300, 1024)]
    younger = partition(6, 0, 700, OPEN), partition(7, 700, 1024, OPEN)
    sealed = partition(4, 0, 1024)
    assert shares(sealed, *gone, *younger) == [(4, 0, 300), (4, 300, 1024)]


@pytest.mark.parametrize("seed", range(60))
def test_shares_are_the_same_whatever_has_expired(seed: int):
    """The shares of each partition that is left are some of those of an attempt that met all
    partitions, and all are covered.
    """
    rng = random.Random(seed)
    story, parents = history(rng)
    met = walked(story, gone=frozenset())
    for _ in range(20):
        gone: set[int] = set()
        for each in story[
            : rng.randrange(len(story))
        ]:  # a partition expires after those that it continues
            if (
                each.state is SEALED
                and parents[int(each.partition_id)] <= gone
                and rng.random() < 0.8
            ):
                gone.add(int(each.partition_id))
        left = walked(story, gone=frozenset(gone))
        assert left <= met
        newest = {int(each.partition_id) for each in story if each.state is OPEN}
        covered = sorted(
            number for i, low, high in left if i in newest for number in range(low, high)
        )
        assert covered == list(range(1024))


def history(rng: random.Random) -> tuple[list[Partition], dict[int, set[int]]]:
    """Partitions of a subject that was resized several times, by id, and what each continues."""
    story: list[Partition] = []
    parents: dict[int, set[int]] = {}
    opened: list[Partition] = []
    for _ in range(rng.randint(2, 5)):
        made = [
            partition(len(story) + 1 + n, *each)
            for n, each in enumerate(split_ranges(rng.randint(1, 7)))
        ]
        for each in made:
            over = [
                old
                for old in opened
                if old.range_start < each.range_end and each.range_start < old.range_end
            ]
            parents[int(each.partition_id)] = {int(old.partition_id) for old in over}
        story += made
        opened = made
    first_open = int(opened[0].partition_id)
    return [
        msgspec.structs.replace(each, state=OPEN) if each.partition_id >= first_open else each
        for each in story
    ], parents


def walked(story: list[Partition], *, gone: frozenset[int]) -> set[tuple[int, int, int]]:
    """Every share that the rows of a task come to: of the oldest partitions, and behind each sealed
    one.
    """
    states = [
        msgspec.structs.replace(each, state=EXPIRED) if each.partition_id in gone else each
        for each in story
    ]
    left = shares(*states)
    seen = set(left)
    while left:
        number, start, end = left.pop()
        if story[number - 1].state is not OPEN:
            behind = shares(*states, bounds=(start, end), after_id=number)
            left += behind
            seen |= set(behind)
    return seen


def test_past_ranges_are_asked_for_until_they_are_told():
    """Those that a hidden subject continues are of another subject, and told by no history of
    it.
    """
    child = msgspec.structs.replace(MERGED, parents=(1, 2))
    gone = partition(1, 0, 300, EXPIRED)
    past = KnownRanges()
    assert not past.needs_history([MERGED])
    past.add([child])
    assert past.needs_history([child])
    past.add_history([gone, child], [child])
    assert not past.needs_history([child])
    with pytest.raises(StaleRouteError):
        past.add_history([gone], [child])


def test_shares_pass_over_a_child_that_is_gone_to_what_continues_it():
    """Of a disk whose loss was accepted nothing is left, while what it continued still has its
    messages.
    """
    parent, sibling = partition(1, 0, 1024), partition(3, 512, 1024, OPEN)
    anew = partition(5, 0, 512, OPEN)
    assert shares(parent, sibling, anew, after_id=1) == [(5, 0, 512), (3, 512, 1024)]


def test_shares_are_refused_while_the_route_lacks_a_logical_partition():
    with pytest.raises(StaleRouteError):
        shares(partition(1, 0, 1024), partition(3, 512, 1024, OPEN), after_id=1)
