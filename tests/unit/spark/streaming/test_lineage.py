"""The partitions that a stream reads: what comes before what, past those that it does not read."""

from __future__ import annotations

import pytest

from keylane.protocol.operations import PartitionHistory
from keylane.protocol.routing import Partition, PartitionState
from keylane.spark.streaming.batches import (
    BatchRange,
    batch_ranges,
    finished_partitions,
    first_offset,
    lost_ranges,
    next_offset,
    task_ranges,
)
from keylane.spark.streaming.lineage import Lineage, StoredOffsets, View, branches_of
from keylane.spark.streaming.offset import StreamOffset


def past(
    number: int, *parents: int, state: PartitionState = PartitionState.SEALED, **facts
) -> PartitionHistory:
    partition = Partition(
        partition_id=number,
        name=f"p{number}",
        queue=0,
        range_start=0,
        range_end=1024,
        broker_group="g1",
        state=state,
        parents=parents,
    )
    return PartitionHistory(partition=partition, **facts)


CHAIN = [past(1, end_offset=4), past(2, 1, end_offset=6), past(3, 2, state=PartitionState.OPEN)]


def test_epochs_count_the_steps_from_the_first_partition():
    """A partition is one step below the deepest of its parents."""
    history = [*CHAIN, past(4, 1, 3, state=PartitionState.OPEN)]
    assert [branch.epoch for branch in branches_of("s", history)] == [0, 1, 2, 3]


def test_partition_comes_after_its_grandparents_where_the_parent_is_not_read():
    """A partition that is not wanted is passed over."""
    lineage = Lineage(branches_of("s", CHAIN), lambda each: each.partition_id != 2)
    assert lineage.required_parents(3) == {1}
    assert lineage.children == {1: {3}, 3: set()}


def test_planned_partitions_are_not_read():
    """Nothing is stored there, and they may never be opened."""
    history = [*CHAIN, past(4, 3, state=PartitionState.PLANNED)]
    assert list(Lineage(branches_of("s", history)).branches) == [1, 2, 3]


def test_child_of_an_abandoned_partition_waits_only_for_its_grandparents():
    """Until the end of the abandoned partition is known; what it has is read when its broker is
    back.
    """
    history = [CHAIN[0], past(2, 1, abandoned=True), CHAIN[2]]
    view = View(
        Lineage(branches_of("s", history)), {1: StoredOffsets(0, 4, True), 3: StoredOffsets(0, 9)}
    )
    start = first_offset(view, {}, {"s": 1})
    assert start.offsets == {1: 0}
    first = next_offset(view, start)
    second = next_offset(view, first)
    assert (first.offsets, second.offsets) == ({1: 4}, {2: 0, 3: 9})
    back = View(view.lineage, {2: StoredOffsets(0, 6), 3: StoredOffsets(0, 9)})
    assert next_offset(back, second).offsets == {2: 6, 3: 9}


def test_lost_partition_is_reported_and_passed_over():
    """Its end is not known: everything behind what was read is lost."""
    lost = past(2, 1, state=PartitionState.EXPIRED, lost=True, abandoned=True)
    before = View(Lineage(branches_of("s", CHAIN[:2])), {2: StoredOffsets(0, 6, True)})
    offset = next_offset(before, first_offset(before, {1: 4}, {"s": 1}), rows_max=2)
    view = View(Lineage(branches_of("s", [CHAIN[0], lost, CHAIN[2]])), {3: StoredOffsets(0, 9)})
    assert [(each.partition_id, each.start, each.end) for each in lost_ranges(view, offset)] == [
        (2, 2, None)
    ]
    assert 2 in finished_partitions(view, offset)
    assert next_offset(view, offset).offsets[3] == 9


def test_stream_that_begins_after_a_loss_does_not_report_it():
    """Neither the lost partition nor expired ones are missed by a stream that begins now."""
    gone = [
        past(1, state=PartitionState.EXPIRED, end_offset=4),
        past(2, state=PartitionState.EXPIRED, lost=True, abandoned=True),
        past(3, end_offset=5),
        past(4, 1, 2, 3, state=PartitionState.OPEN),
    ]
    view = View(
        Lineage(branches_of("s", gone)), {3: StoredOffsets(0, 5, True), 4: StoredOffsets(0, 1)}
    )
    start = first_offset(view, {3: 0, 4: 0}, {"s": 1})
    assert list(lost_ranges(view, start)) == []
    first = next_offset(view, start)
    second = next_offset(view, first)
    assert (first.offsets[3], 4 in first.offsets) == (5, False)
    assert second.offsets == {4: 1}
    assert list(lost_ranges(view, second)) == []


def test_partition_that_is_not_read_makes_no_rows_of_another_one():
    """1 is split into 2 and 3, which are merged: without 2, partition 4 continues both 1 and 3, and
    3 has messages.
    """
    history = [
        past(1, end_offset=4),
        past(2, 1, end_offset=5),
        past(3, 1, end_offset=6),
        past(4, 2, 3, state=PartitionState.OPEN),
    ]
    stored = {
        1: StoredOffsets(0, 4, True),
        3: StoredOffsets(0, 6, True),
        4: StoredOffsets(0, 7),
    }
    view = View(Lineage(branches_of("s", history), lambda each: each.partition_id != 2), stored)
    offset, read = first_offset(view, {}, {"s": 1}), []
    for _ in range(3):
        offset = next_offset(view, offset)
        read.append(dict(offset.offsets))
    assert read == [{1: 4}, {3: 6}, {4: 7}]


def cut_over(*, messages: int) -> View:
    """Rows (2) took the place of the messages of 1, and what was sent meanwhile (3) lies behind
    both.
    """
    history = [
        past(1, state=PartitionState.EXPIRED, end_offset=4),
        past(2, 1, end_offset=8),
        past(3, 1, 2, state=PartitionState.OPEN),
    ]
    stored = {2: StoredOffsets(0, 8, True), 3: StoredOffsets(0, messages)}
    return View(Lineage(branches_of("s", history)), stored)


def test_stream_that_had_all_messages_goes_on_behind_the_rows_that_took_their_place():
    """Also where nothing was sent behind them yet; one that had a part of them gets all rows, and
    is told of its loss.
    """
    before = View(Lineage(branches_of("s", [past(1, end_offset=4)])), {1: StoredOffsets(0, 4)})
    start = first_offset(before, {1: 0}, {"s": 1})
    whole, part = next_offset(before, start), next_offset(before, start, rows_max=3)
    assert next_offset(cut_over(messages=0), whole) is whole
    third = next_offset(cut_over(messages=5), whole)
    assert third.offsets == {3: 5}
    assert list(lost_ranges(cut_over(messages=5), whole)) == []
    assert next_offset(cut_over(messages=6), third).offsets == {3: 6}
    assert next_offset(cut_over(messages=5), part).offsets[2] == 8
    assert [(each.start, each.end) for each in lost_ranges(cut_over(messages=5), part)] == [(3, 4)]


def test_stream_goes_on_behind_the_rows_when_the_last_partition_before_them_was_empty():
    """An empty partition is never in an offset; a stream that lacks messages before it gets the
    rows.
    """
    expired = PartitionState.EXPIRED
    before = [past(1, end_offset=4), past(2, 1, state=PartitionState.OPEN)]
    stored = {1: StoredOffsets(0, 4, True), 2: StoredOffsets(0, 0)}
    view = View(Lineage(branches_of("s", before)), stored)
    start = first_offset(view, {1: 0, 2: 0}, {"s": 1})
    whole, part = next_offset(view, start), next_offset(view, start, rows_max=3)
    history = [
        past(1, state=expired, end_offset=4),
        past(2, 1, state=expired, end_offset=0),
        past(3, 2, end_offset=4),
        past(4, 2, 3, state=PartitionState.OPEN),
    ]
    after = View(
        Lineage(branches_of("s", history)), {3: StoredOffsets(0, 4, True), 4: StoredOffsets(0, 5)}
    )
    assert next_offset(after, whole).offsets == {1: 4, 4: 5}
    assert next_offset(after, part).offsets[3] == 4
    begun = first_offset(after, {3: 0, 4: 0}, {"s": 1})
    assert next_offset(after, begun).offsets[3] == 4


def test_stream_that_begins_behind_a_cut_over_reads_the_rows():
    start = first_offset(cut_over(messages=5), {2: 0, 3: 0}, {"s": 1})
    first = next_offset(cut_over(messages=5), start)
    assert first.offsets[2] == 8
    assert next_offset(cut_over(messages=5), first).offsets == {3: 5}


def test_tasks_of_a_batch_stay_when_it_is_replayed_after_a_resize_and_a_loss():
    """A sink knows rows again by their task: what continues partitions, and what has expired,
    changes none.
    """
    ranges = [BatchRange(1, 0, 4), BatchRange(2, 0, 6), BatchRange(4, 0, 5), BatchRange(5, 2, 9)]
    history = [past(1, end_offset=4), past(2, 1), past(4), past(5)]
    first = task_ranges(View(Lineage(branches_of("s", history))), ranges, rows_max=12)
    assert first == [ranges[:2], ranges[2:]]
    history[0] = past(1, end_offset=4, state=PartitionState.EXPIRED)
    history[2] = past(4, end_offset=5, state=PartitionState.EXPIRED)
    grown = [*history, past(6, 2, 4, 5, state=PartitionState.OPEN)]
    view = View(Lineage(branches_of("s", grown)))
    assert task_ranges(view, ranges, rows_max=12) == first
    start, end = (
        StreamOffset(subjects={"s": 1}),
        StreamOffset(subjects={"s": 1}, offsets={1: 4, 2: 6, 4: 5, 5: 9}),
    )
    before = View(Lineage(branches_of("s", history)))
    assert batch_ranges(view, start, end) == batch_ranges(before, start, end)


@pytest.mark.parametrize(("rows_max", "ahead_max"), [(100, 0), (350, 0), (1_000, 0), (None, 0)])
def test_batch_holds_back_a_partition_when_others_have_more_behind_them(rows_max, ahead_max):
    """1 was moved twice, 4 never: read up to now at once, 4 would have a watermark drop the rows of
    2 and 3.
    """
    history = [*CHAIN, past(4, state=PartitionState.OPEN)]
    stored = {
        1: StoredOffsets(0, 40, True),
        2: StoredOffsets(0, 60, True),
        3: StoredOffsets(0, 100),
        4: StoredOffsets(0, 200),
    }
    view = View(Lineage(branches_of("s", history)), stored)
    offset, moved, never_moved = first_offset(view, {}, {"s": 1}), [0], [0]
    while (end := next_offset(view, offset, rows_max=rows_max)) is not offset:
        rows = {
            each.partition_id: each.end - each.start for each in batch_ranges(view, offset, end)
        }
        never_moved.append(never_moved[-1] + rows.pop(4, 0))
        moved.append(moved[-1] + sum(rows.values()))
        offset = end
    assert (moved[-1], never_moved[-1]) == (200, 200)
    assert max(b - a for a, b in zip(moved, never_moved, strict=True)) <= ahead_max
    assert len(moved) <= 1 + 4 + 2  # batches of a hundred, and one more for each seal
