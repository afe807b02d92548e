"""Cursors of a reset, for any lineage and any request: messages come again in order, without a
gap.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from keylane.metaserver.resets.cursors import (
    PartitionOffsets,
    check_request,
    compute_cursors,
    order_generations,
)
from keylane.protocol.errors import (
    InvalidRequestError,
    OffsetOutOfRangeError,
    PartitionUnknownError,
)
from keylane.protocol.progress import ResetGroup, ResetTo
from keylane.protocol.routing import Partition, PartitionState


@st.composite
def lineages(draw: st.DrawFn) -> list[PartitionOffsets]:
    """Partitions of a subject that was changed at random; parents have lower ids."""
    lineage: list[PartitionOffsets] = []
    for number in range(1, draw(st.integers(2, 9))):
        parents = draw(st.sets(st.integers(1, number - 1), max_size=3)) if number > 1 else set()
        lineage.append(partition_offsets(draw, number, tuple(sorted(parents)), queue=number))
    return lineage


@st.composite
def chains(draw: st.DrawFn) -> list[PartitionOffsets]:
    """One or two queues, each a chain of partitions with ids that are mixed."""
    lineage: list[PartitionOffsets] = []
    last: dict[int, PartitionOffsets] = {}
    for number in range(1, draw(st.integers(2, 9))):
        queue = draw(st.integers(0, 1))
        before = last.get(queue)
        parents = () if before is None else (before.partition.partition_id,)
        start = 0 if before is None else before.partition.logic_start + before.next_offset
        last[queue] = partition_offsets(draw, number, parents, queue=queue, logic_start=start)
        lineage.append(last[queue])
    return lineage


def partition_offsets(
    draw: st.DrawFn, number: int, parents: tuple[int, ...], **more: int
) -> PartitionOffsets:
    count = draw(st.integers(0, 6))
    first = draw(st.integers(0, count))
    at_time = draw(st.none() | st.integers(first, count - 1)) if first < count else None
    cursor = draw(st.none() | st.integers(0, count))
    partition = Partition(
        partition_id=number,
        name=f"s.p{number}",
        range_start=0,
        range_end=1024,
        broker_group="g1",
        state=PartitionState.SEALED,
        parents=parents,
        **more,
    )
    return PartitionOffsets(
        partition=partition,
        first_offset=first,
        next_offset=count,
        offset_at_time=at_time,
        cursor=cursor,
    )


targets = st.sampled_from(
    [
        ResetGroup(to=ResetTo.EARLIEST),
        ResetGroup(to=ResetTo.LATEST),
        ResetGroup(to=ResetTo.TIME, at_ms=1),
    ]
)


@given(st.one_of(lineages(), chains()), st.booleans(), st.integers(-20, 20).filter(bool))
def test_plan_of_a_shift_can_be_set_as_cursors(lineage, static, shift):
    """It stays within what is stored, leaves no gap, and set again it changes nothing."""
    asked = ResetGroup(to=ResetTo.SHIFT, shift=shift, dry_run=True)
    planned = compute_cursors(asked, lineage, static=static)
    check_no_gap(lineage, planned)
    again = ResetGroup(to=ResetTo.CURSORS, cursors=planned)
    check_request(again, static=static)
    assert compute_cursors(again, lineage, static=static) == planned


def test_shift_counts_from_the_first_message_that_is_not_acked():
    def part(number, count, cursor, state, *parents):
        partition = Partition(
            partition_id=number,
            name=f"s.p{number}",
            queue=0,
            range_start=0,
            range_end=1024,
            broker_group="g1",
            state=state,
            parents=parents,
            logic_start=0 if number == 1 else 100,
        )
        return PartitionOffsets(
            partition=partition, first_offset=0, next_offset=count, cursor=cursor
        )

    lineage = [
        part(1, 100, 100, PartitionState.SEALED),
        part(2, 50, 30, PartitionState.OPEN, 1),
    ]

    def shifted(count: int, *, static: bool) -> list[int]:
        asked = ResetGroup(to=ResetTo.SHIFT, shift=count, dry_run=True)
        return list(compute_cursors(asked, lineage, static=static).values())

    assert shifted(-10, static=False) == shifted(-10, static=True) == [100, 20]
    assert shifted(-40, static=False) == [100, 0], "a partition that is drained stays so"
    assert shifted(-40, static=True) == [90, 0], "a queue goes on before"
    assert shifted(1_000, static=False) == shifted(1_000, static=True) == [100, 50]
    unread = [replace(each, cursor=None) for each in lineage]
    asked = ResetGroup(to=ResetTo.SHIFT, shift=7, dry_run=True)
    assert compute_cursors(asked, unread, static=False) == {1: 7, 2: 0}


@pytest.mark.parametrize(
    ("ask", "text"),
    [
        ({"to": "shift", "dry_run": True}, "shift goes with"),
        ({"to": "latest", "shift": 3}, "shift goes with"),
        ({"to": "shift", "shift": 0, "dry_run": True}, "changes nothing"),
        ({"to": "shift", "shift": 3}, "planned with dry_run"),
        ({"to": "cursors"}, "cursors go with"),
        ({"to": "latest", "cursors": {1: 3}}, "cursors go with"),
    ],
)
def test_relative_target_has_one_meaning(ask, text):
    with pytest.raises(InvalidRequestError, match=text):
        check_request(ResetGroup(**{**ask, "to": ResetTo(ask["to"])}), static=False)


@given(lineages())
def test_cursors_of_partitions_or_offsets_that_are_not_there_are_refused(lineage):
    number = lineage[-1].partition.partition_id
    with pytest.raises(PartitionUnknownError):
        compute_cursors(ResetGroup(to=ResetTo.CURSORS, cursors={99: 0}), lineage, static=False)
    beyond = ResetGroup(to=ResetTo.CURSORS, cursors={number: lineage[-1].next_offset + 1})
    with pytest.raises(OffsetOutOfRangeError, match=rf" of partition {number} is not in \["):
        compute_cursors(beyond, lineage, static=False)


def check_no_gap(lineage: list[PartitionOffsets], cursors: dict[int, int]) -> None:
    """A child of a partition that is not acked to its end begins at its first message, and so do
    its own children.
    """
    behind: set[int] = set()
    for each in lineage:
        number = each.partition.partition_id
        assert each.first_offset <= cursors[number] <= each.next_offset
        after = not behind.isdisjoint(each.partition.parents)
        if after:
            assert cursors[number] == each.first_offset
        if after or cursors[number] < each.next_offset:
            behind.add(number)


@given(lineages(), targets)
def test_cursors_without_queues_leave_no_child_ahead_of_its_parents(lineage, ask):
    """Earliest is every first message, latest every end, a time never beyond a parent that is not
    at its end.
    """
    cursors = compute_cursors(ask, lineage, static=False)
    check_no_gap(lineage, cursors)
    for each in lineage:
        cursor = cursors[each.partition.partition_id]
        if ask.to is ResetTo.EARLIEST:
            assert cursor == each.first_offset
        elif ask.to is ResetTo.LATEST:
            assert cursor == each.next_offset
        elif each.offset_at_time is not None:
            assert cursor <= each.offset_at_time


@given(chains(), targets)
def test_cursors_of_queues_are_set_queue_by_queue(lineage, ask):
    """The first partition with a message of that time has the cursor; the later ones are read
    whole.
    """
    cursors = compute_cursors(ask, lineage, static=True)
    for queue in {each.partition.queue for each in lineage}:
        chain = [each for each in lineage if each.partition.queue == queue]
        check_no_gap(chain, cursors)
        if ask.to is ResetTo.TIME:
            hit = next((each for each in chain if each.offset_at_time is not None), None)
            if hit is None:
                assert all(
                    cursors[each.partition.partition_id] == each.next_offset for each in chain
                )
            else:
                assert cursors[hit.partition.partition_id] == hit.offset_at_time


@st.composite
def split_queues(draw: st.DrawFn) -> list[PartitionOffsets]:
    """Partitions each of which continues the queue of an older one, or begins a queue of its own
    behind it.
    """
    lineage = [partition_offsets(draw, 1, (), queue=0)]
    for number in range(2, draw(st.integers(3, 9))):
        parent = draw(st.sampled_from(lineage))
        queue, start = number, 0
        continued = [each for each in lineage if each.partition.queue == parent.partition.queue]
        if parent is continued[-1] and draw(st.booleans()):
            queue = parent.partition.queue
            start = parent.partition.logic_start + parent.next_offset
        parents = (parent.partition.partition_id,)
        lineage.append(partition_offsets(draw, number, parents, queue=queue, logic_start=start))
    return lineage


@given(split_queues(), targets)
def test_cursors_of_split_queues_leave_no_queue_ahead_of_the_one_it_was_split_off(lineage, ask):
    """Brokers' clocks differ: a new queue begins at its first message while the older queue is not
    at its end.
    """
    cursors = compute_cursors(ask, lineage, static=True)
    check_no_gap(lineage, cursors)
    for each in lineage:
        if ask.to is ResetTo.EARLIEST:
            assert cursors[each.partition.partition_id] == each.first_offset
        elif ask.to is ResetTo.LATEST:
            assert cursors[each.partition.partition_id] == each.next_offset


@given(chains(), st.integers(0, 60))
def test_queue_is_set_to_an_offset_in_it_only(lineage, offset):
    """A queue is set to a logic offset in it, and to no other."""
    chain = [each for each in lineage if each.partition.queue == 0]
    assume(chain)
    left = [
        each.partition.logic_start + at
        for each in chain
        for at in range(each.first_offset, each.next_offset)
    ]
    end = chain[-1].partition.logic_start + chain[-1].next_offset
    ask = ResetGroup(to=ResetTo.OFFSET, offset=offset, queue=0)
    if not min(left, default=end) <= offset <= end:
        with pytest.raises(OffsetOutOfRangeError):
            compute_cursors(ask, chain, static=True)
        return
    cursors = compute_cursors(ask, chain, static=True)
    check_no_gap(chain, cursors)
    again = [
        each.partition.logic_start + at
        for each in chain
        for at in range(cursors[each.partition.partition_id], each.next_offset)
    ]
    assert again == [at for at in left if at >= offset]


@given(lineages())
def test_children_are_set_before_their_parents(lineage):
    """Every partition is in one generation, after all its children."""
    order = order_generations([each.partition for each in lineage])
    place = {number: index for index, ids in enumerate(order) for number in ids}
    assert sorted(place) == [each.partition.partition_id for each in lineage]
    for each in lineage:
        for parent in each.partition.parents:
            assert place[each.partition.partition_id] < place[parent]


@pytest.mark.parametrize(
    ("ask", "static"),
    [
        (ResetGroup(to=ResetTo.OFFSET, queue=0), True),
        (ResetGroup(to=ResetTo.OFFSET, offset=1), True),
        (ResetGroup(to=ResetTo.EARLIEST, offset=1, queue=0), True),
        (ResetGroup(to=ResetTo.TIME), False),
        (ResetGroup(to=ResetTo.LATEST, at_ms=1), False),
        (ResetGroup(to=ResetTo.LATEST, queue=0, partition_id=1), True),
        (ResetGroup(to=ResetTo.LATEST, partition_id=1), True),
    ],
)
def test_request_with_two_meanings_or_none_is_refused(ask, static):
    """It is refused before a broker is asked."""
    with pytest.raises(InvalidRequestError):
        check_request(ask, static=static)
