"""Which ancestors' parked messages a granted partition adopts, and which partitions are
finished.
"""

from __future__ import annotations

from typing import Any

import pytest
import sqlalchemy as sa

from keylane.metaserver.cluster.partitions import BY_ID, read_partitions
from keylane.metaserver.groups.parked_ancestors import (
    Ancestor,
    adopted_ranges,
    find_finished_partitions,
    read_adopted,
)
from keylane.metaserver.groups.sessions import join_group
from keylane.metaserver.sql.schema import drained as drained_rows
from keylane.metaserver.sql.schema import leases, partitions
from keylane.protocol.control import Join, Joined
from keylane.protocol.ids import PartitionId
from keylane.protocol.routing import Partition, PartitionState
from support.sql.rows import Rows


def partition(number: int, *parents: int, start: int = 0, end: int = 1024) -> Partition:
    return Partition(
        partition_id=number,
        name=f"s.p{number}",
        queue=number,
        range_start=start,
        range_end=end,
        broker_group="g1",
        state=PartitionState.OPEN,
        parents=parents,
    )


def drained(token: int, *parents: int, start: int = 0, end: int = 1024, **more: Any) -> Ancestor:
    return Ancestor(
        range_start=start, range_end=end, parents=parents, token=token, is_finished=True, **more
    )


def test_partition_takes_over_what_its_parents_have_left():
    known = {1: drained(4, has_parked=True), 2: drained(5)}
    assert adopted_ranges(partition(3, 1, 2), known) == {1: ()}


@pytest.mark.parametrize(("token", "expected"), [(9, {1: ((0, 1024),)}), (3, {})])
def test_grandparent_counts_when_it_was_granted_after_the_partition_between(
    token: int, expected: dict[int, Any]
):
    """What it left before came by way of that one."""
    known = {1: drained(token, has_parked=True), 2: drained(4, 1)}
    assert adopted_ranges(partition(3, 2), known) == expected


def test_ancestor_counts_at_any_distance_when_all_between_were_granted_before():
    known = {1: drained(9, has_parked=True), 2: drained(4, 1), 3: drained(5, 2, has_parked=True)}
    assert adopted_ranges(partition(4, 3), known) == {3: (), 1: ((0, 1024),)}
    known[2] = drained(10, 1)
    assert adopted_ranges(partition(4, 3), known) == {3: ()}


def test_merged_partition_takes_over_the_part_that_did_not_come_by_way_of_a_child():
    """2 was drained when 1 was reset, 3 was not: it has taken its half over."""
    known = {
        1: drained(9, has_parked=True),
        2: drained(4, 1, end=512),
        3: drained(11, 1, start=512, has_parked=True),
    }
    assert adopted_ranges(partition(4, 2, 3), known) == {3: (), 1: ((0, 512),)}
    known[3] = drained(5, 1, start=512)
    assert adopted_ranges(partition(4, 2, 3), known) == {1: ((0, 1024),)}


def test_partition_takes_nothing_over_of_ancestors_that_share_no_range_with_the_way_to_them():
    """2 and 3 are lost, and 3 continues no part of 1. What 1 had came by way of 4, which lives."""
    known = {
        1: drained(4, end=341, has_parked=True),
        2: drained(0, 1, start=256, end=512),
        3: drained(0, 2, start=341, end=682),
        4: drained(9, 1, end=341, has_parked=True),
        5: drained(0, 3, 4),
    }
    assert adopted_ranges(partition(6, 5), known) == {4: ((0, 341),)}
    known[4] = drained(9, 1, end=341)
    assert adopted_ranges(partition(6, 5), known) == {}
    assert find_finished_partitions([partition(6, 5)], known, ()) == [6]


def test_partition_takes_nothing_over_past_one_that_is_not_drained():
    """It takes that over itself, when it is granted."""
    known = {
        1: drained(9, has_parked=True),
        2: Ancestor(range_start=0, range_end=1024, parents=(1,), token=4),
    }
    assert adopted_ranges(partition(3, 2), known) == {}


def test_long_chain_is_walked_without_a_limit():
    """Each partition between was moved and drained."""
    known = {1: drained(9_000, has_parked=True)}
    known |= {number: drained(number, number - 1) for number in range(2, 5_000)}
    assert adopted_ranges(partition(5_000, 4_999), known) == {1: ((0, 1024),)}


def test_many_splits_and_merges_are_walked_once_each():
    """As many paths lead up as there are numbers of sixty bits."""
    known, top = {1: drained(9_000, has_parked=True)}, (1,)
    for number in range(2, 122, 2):
        known[number] = drained(number, *top, end=512)
        known[number + 1] = drained(number, *top, start=512)
        top = number, number + 1
    assert adopted_ranges(partition(500, *top), known) == {1: ((0, 1024),)}


def test_partition_at_its_end_has_an_owner_first_when_an_ancestor_left_something():
    """So have those behind it."""
    known = {
        1: drained(9, has_parked=True),
        2: drained(4, 1),
        3: Ancestor(range_start=0, range_end=1024, parents=(2,), token=12),
        4: Ancestor(range_start=0, range_end=1024, parents=(3,), token=13),
        5: Ancestor(range_start=0, range_end=1024, token=14),
    }
    at_end = [partition(3, 2), partition(4, 3), partition(5)]
    assert find_finished_partitions(at_end, known, ()) == [5]
    known[1] = drained(9)
    assert find_finished_partitions(at_end, known, ()) == [3, 4, 5]
    assert find_finished_partitions(at_end, known, [3]) == [3, 5]


@pytest.mark.parametrize(("token", "expected"), [(0, {1: ((0, 1024),)}), (9, {})])
def test_grandparent_counts_when_the_partition_between_is_lost(
    token: int, expected: dict[int, Any]
):
    """A lost partition counts as never granted: what its owner has taken over of a living ancestor
    is not known.
    """
    known = {1: drained(4, has_parked=True), 2: drained(token, 1)}
    assert adopted_ranges(partition(3, 2), known) == expected


def resized_twice() -> tuple[Rows, Joined]:
    """Partitions 2 and 3 continue 1, and 4 continues both; the group has one session."""
    rows = Rows()
    rows.report("g1")
    rows.create("s", 1)
    rows.resize("s", 2)
    rows.resize("s", 1)
    joined = rows.run(
        join_group, Join(subject="s", group="g", session="a" * 32, ttl_ms=9_000), sessions_max=9
    )
    return rows, joined


@pytest.mark.parametrize(("left", "ancestors"), [(True, [1, 2]), (False, [])])
def test_lost_partition_that_left_nothing_keeps_what_its_owners_have_done(
    left: bool, ancestors: list[int]
):
    """The group had drained it before its disk was lost: what it had taken over of its parent was
    handled.
    """
    rows, joined = resized_twice()

    def owners(connection: sa.Connection) -> list[int]:
        grown = {1: (4, True), 2: (5, left), 3: (6, False)}
        here = {"group_id": joined.group_id}
        for number, (token, parked) in grown.items():
            row = here | {"partition_id": number}
            connection.execute(sa.insert(drained_rows).values(row | {"parked": parked}))
            connection.execute(sa.insert(leases).values(row | {"token": token, "withdrawn": False}))
        lost = sa.update(partitions).where(partitions.c.partition_id == 2).values(lost=True)
        connection.execute(lost)
        (held,) = read_partitions(connection, BY_ID, ids=[4])
        taken = read_adopted(connection, joined.group_id, [held])[PartitionId(4)]
        return sorted(each.partition.partition_id for each in taken)

    assert rows.run(owners) == ancestors


def test_ancestor_behind_a_lost_partition_counts_when_it_is_the_parent_of_another_one_held():
    """The same session has 3, which continues 1, and 4, which continues the lost 2, and so 1 as
    well.
    """
    rows, joined = resized_twice()

    def ranges(connection: sa.Connection) -> dict[int, dict[int, Any]]:
        here = {"group_id": joined.group_id}
        connection.execute(
            sa.insert(drained_rows).values(here | {"partition_id": 1, "parked": True})
        )
        for number, token in ((1, 4), (2, 5), (3, 6)):
            row = here | {"partition_id": number, "token": token, "withdrawn": False}
            connection.execute(sa.insert(leases).values(row))
        lost = sa.update(partitions).where(partitions.c.partition_id == 2).values(lost=True)
        connection.execute(lost)
        held = read_partitions(connection, BY_ID, ids=[3, 4])
        taken = read_adopted(connection, joined.group_id, held)
        return {
            int(number): {int(each.partition.partition_id): each.ranges for each in ancestors}
            for number, ancestors in taken.items()
        }

    assert rows.run(ranges) == {3: {1: ()}, 4: {1: ((0, 512),)}}


@pytest.mark.parametrize("grandparent_left", [False, True])
def test_parent_whose_loss_was_accepted_holds_no_child_up(grandparent_left: bool):
    """
    Named as expired it is given up by its child at once; it is not named where more of its lineage
    is read.

    Either way nothing of it is waited for, and what the living grandparent has parked is taken
    over.
    """
    rows, joined = resized_twice()

    def taken(connection: sa.Connection) -> dict[int, PartitionState]:
        here = {"group_id": joined.group_id}
        for number, (token, parked) in {
            1: (4, grandparent_left),
            2: (5, True),
            3: (6, False),
        }.items():
            row = here | {"partition_id": number}
            connection.execute(sa.insert(drained_rows).values(row | {"parked": parked}))
            connection.execute(sa.insert(leases).values(row | {"token": token, "withdrawn": False}))
        lost = sa.update(partitions).where(partitions.c.partition_id == 2)
        connection.execute(lost.values(lost=True, state=PartitionState.EXPIRED))
        held = read_partitions(connection, BY_ID, ids=[4])
        ancestors = read_adopted(connection, joined.group_id, held).get(PartitionId(4), [])
        return {int(each.partition.partition_id): each.partition.state for each in ancestors}

    ancestors = rows.run(taken)
    assert ancestors.get(2, PartitionState.EXPIRED) is PartitionState.EXPIRED
    assert (1 in ancestors) is grandparent_left
