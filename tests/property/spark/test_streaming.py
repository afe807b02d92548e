"""Batches of streams over random lineages: every message once, parents before children, replays the
same.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from keylane.protocol.operations import PartitionHistory
from keylane.protocol.routing import Partition, PartitionState
from keylane.spark.streaming.batches import (
    batch_ranges,
    divide_batch,
    first_offset,
    group_by_lineage,
    lost_ranges,
    next_offset,
    stored_end,
)
from keylane.spark.streaming.lineage import Lineage, StoredOffsets, View, branches_of
from keylane.spark.streaming.offset import from_json, to_json

SUBJECTS = {"flights": 7}


@dataclass
class ModelPartition:
    """A partition of the model."""

    low: int
    high: int
    parents: tuple[int, ...] = ()
    first: int = 0
    end: int = 0
    sealed: bool = False
    expired: bool = False


@dataclass
class ModelSubject:
    """A subject whose partitions are resized, fill and expire."""

    shelves: dict[int, ModelPartition] = field(default_factory=lambda: {1: ModelPartition(0, 8)})
    asked: int | None = None
    """The logical partition of the key that the stream reads; None: it reads all."""

    def is_read(self, number: int) -> bool:
        shelf = self.shelves[number]
        return self.asked is None or shelf.low <= self.asked < shelf.high

    def open(self) -> list[int]:
        return sorted(
            (number for number, shelf in self.shelves.items() if not shelf.sealed),
            key=lambda number: self.shelves[number].low,
        )

    def reshape(self, first: int, count: int, edges: list[int]) -> None:
        """Seal `count` neighbours, and open what continues them, with these inner edges."""
        chosen = self.open()
        chosen = chosen[first % len(chosen) :][:count]
        low, high = self.shelves[chosen[0]].low, self.shelves[chosen[-1]].high
        cuts = [low, *sorted({edge for edge in edges if low < edge < high}), high]
        for number in chosen:
            self.shelves[number].sealed = True
        for start, end in pairwise(cuts):
            parents = tuple(
                number
                for number in chosen
                if self.shelves[number].low < end and start < self.shelves[number].high
            )
            self.shelves[max(self.shelves) + 1] = ModelPartition(start, end, parents)

    def view(self) -> View:
        history = [
            PartitionHistory(
                partition=Partition(
                    partition_id=number,
                    name=f"p{number}",
                    queue=0,
                    range_start=shelf.low,
                    range_end=shelf.high,
                    broker_group="g1",
                    state=PartitionState.EXPIRED
                    if shelf.expired
                    else PartitionState.SEALED
                    if shelf.sealed
                    else PartitionState.OPEN,
                    parents=shelf.parents,
                ),
                end_offset=shelf.end if shelf.sealed else None,
            )
            for number, shelf in self.shelves.items()
        ]
        stored = {
            number: StoredOffsets(shelf.first, shelf.end, shelf.sealed)
            for number, shelf in self.shelves.items()
            if not shelf.expired and self.is_read(number)
        }
        lineage = Lineage(
            branches_of("flights", history), lambda each: self.is_read(int(each.partition_id))
        )
        return View(lineage, stored)


class StreamMachine(RuleBasedStateMachine):
    """A stream of a subject: batches, replays, restarts from the checkpoint, at any moment of the
    subject's life.
    """

    @initialize(
        filled=st.lists(st.integers(0, 5), min_size=1, max_size=4),
        edges=st.lists(st.integers(1, 7), max_size=3),
        latest=st.booleans(),
        removed=st.integers(0, 3),
        asked=st.one_of(st.none(), st.integers(0, 7)),
    )
    def begin(self, filled, edges, latest, removed, asked) -> None:
        self.subject = ModelSubject(asked=asked)
        for count in filled:
            self.append(count, 0)
            self.subject.reshape(0, 3, edges)
        self.remove(removed, 0)
        view = self.subject.view()
        self.begins = {
            number: stored.end if latest else stored.first for number, stored in view.stored.items()
        }
        self.offset = to_json(first_offset(view, self.begins, SUBJECTS))
        self.read: dict[int, int] = dict(self.begins)
        """Partition id → one past the last offset that was read."""
        self.last_batch: dict[int, int] = {}
        self.batch = 0

    @rule(count=st.integers(1, 5), which=st.integers(0, 9))
    def append(self, count, which) -> None:
        chosen = self.subject.open()
        self.subject.shelves[chosen[which % len(chosen)]].end += count

    @rule(
        first=st.integers(0, 9),
        count=st.integers(1, 3),
        edges=st.lists(st.integers(1, 7), max_size=3),
    )
    def reshape(self, first, count, edges) -> None:
        if len(self.subject.shelves) < 40:
            self.subject.reshape(first, count, edges)

    def remove(self, count, which) -> None:
        """Retention removes the first messages of a partition; those that are read, once the stream
        has begun.
        """
        shelves = list(self.subject.shelves.values())
        shelf = shelves[which % len(shelves)]
        shelf.first = min(shelf.end, shelf.first + count)

    @rule(which=st.integers(0, 40))
    def remove_what_was_read(self, which) -> None:
        numbers = list(self.subject.shelves)
        number = numbers[which % len(numbers)]
        shelf = self.subject.shelves[number]
        shelf.first = max(shelf.first, min(self.read.get(number, 0), shelf.end))
        parents_gone = all(self.subject.shelves[parent].expired for parent in shelf.parents)
        if shelf.sealed and shelf.first == shelf.end and parents_gone:
            shelf.expired = True

    @rule(rows_max=st.one_of(st.none(), st.integers(1, 6)), replay=st.booleans())
    def run_batch(self, rows_max, replay) -> None:
        view = self.subject.view()
        start = from_json(self.offset)
        assert list(lost_ranges(view, start)) == []
        end = next_offset(view, start, rows_max=rows_max)
        if end is start:
            assert self.batch, "batch 0 has an end of its own, with where it began"
            return
        planned = batch_ranges(view, start, end)
        self.offset = json.loads(json.dumps(to_json(end)))
        if replay:
            self.reshape(0, 2, [3])
            self.append(2, 1)
            if start.initial:
                moved = self.subject.view()
                start = first_offset(
                    moved, {number: each.end for number, each in moved.stored.items()}, SUBJECTS
                )
            assert batch_ranges(self.subject.view(), start, from_json(self.offset)) == planned
        self.take(planned, rows_max)

    def take(self, planned, rows_max) -> None:
        self.batch += 1
        assert rows_max is None or sum(each.end - each.start for each in planned) <= rows_max
        for each in planned:
            number = each.partition_id
            assert each.start == self.read.get(number, 0), "every message once, in order"
            assert each.end <= self.subject.shelves[number].end
            self.read[number] = each.end
            for parent in filter(self.subject.is_read, self.subject.shelves[number].parents):
                ended = self.read.get(parent, 0) == self.subject.shelves[parent].end
                assert self.subject.shelves[parent].expired or ended
                assert self.last_batch.get(parent, -1) < self.batch
            self.last_batch[number] = self.batch

    @precondition(lambda self: hasattr(self, "offset"))
    @invariant()
    def everything_is_read_at_the_end(self) -> None:
        """From here on, without new messages, the stream comes to the end of every partition, and
        stays there.
        """
        view = self.subject.view()
        read = dict(self.read)
        offset = from_json(self.offset)
        for _ in range(100):
            end = next_offset(view, offset, rows_max=None)
            for each in batch_ranges(view, offset, end):
                assert read.get(each.partition_id, 0) == each.start
                read[each.partition_id] = each.end
            if end is offset:
                break
            offset = end
        assert {number: read.get(number, 0) for number in view.stored} == {
            number: max(stored.end, self.begins.get(number, 0))
            for number, stored in view.stored.items()
        }
        assert next_offset(view, offset) is offset

    @precondition(lambda self: hasattr(self, "offset"))
    @invariant()
    def a_batch_of_everything_reads_the_rest_in_order(self) -> None:
        """Where Spark does not tell the start, one batch has all that is left, and its tasks keep
        the lineage.
        """
        view = self.subject.view()
        start = from_json(self.offset)
        end = stored_end(view, SUBJECTS, first_offset(view, self.begins, SUBJECTS))
        ranges = batch_ranges(view, start, end)
        assert {each.partition_id: (each.start, each.end) for each in ranges} == {
            number: (self.read.get(number, 0), stored.end)
            for number, stored in view.stored.items()
            if stored.end > self.read.get(number, 0)
        }
        tasks = group_by_lineage(view, ranges)
        assert sorted(each.partition_id for task in tasks for each in task) == sorted(
            each.partition_id for each in ranges
        )
        place = {
            each.partition_id: (at, index)
            for at, task in enumerate(tasks)
            for index, each in enumerate(task)
        }
        for number, (task, index) in place.items():
            for ancestor in view.lineage.ancestors(number) & place.keys():
                assert place[ancestor][0] == task
                assert place[ancestor][1] < index


TestStreamMachine = StreamMachine.TestCase
TestStreamMachine.settings = settings(max_examples=60, stateful_step_count=20, deadline=None)


@given(
    st.dictionaries(st.integers(1, 50), st.integers(1, 1_000), min_size=1, max_size=12),
    st.integers(1, 3_000),
    st.integers(0, 100),
)
def test_shares_are_as_many_as_allowed_and_one_at_least(counts, rows_max, turn):
    """As many rows as are allowed or there; none more than a partition has; one of each if that is
    allowed.
    """
    taken = divide_batch(counts, rows_max, rotation=turn)
    assert sum(taken.values()) == min(rows_max, sum(counts.values()))
    assert all(1 <= taken[number] <= counts[number] for number in taken)
    assert len(taken) == min(rows_max, len(counts))


@given(
    st.dictionaries(st.integers(1, 50), st.integers(1, 1_000), min_size=1, max_size=12),
    st.dictionaries(st.integers(1, 50), st.integers(1, 9_000), max_size=12),
    st.integers(1, 3_000),
)
def test_shares_are_no_more_than_those_of_all_messages_when_some_wait(counts, behind, rows_max):
    """A partition takes of what it has what it would take if it had what waits behind it, too."""
    taken = divide_batch(counts, rows_max, rotation=0, waiting_behind=behind)
    weights = {number: count + behind.get(number, 0) for number, count in counts.items()}
    of_all = divide_batch(weights, rows_max, rotation=0)
    assert taken == {number: min(count, counts[number]) for number, count in of_all.items()}


@pytest.mark.parametrize("rows_max", [1, 2])
def test_partitions_take_turns_where_there_are_fewer_rows(rows_max):
    """No partition waits for ever."""
    served = set()
    for turn in range(0, 9, rows_max):
        served |= divide_batch({1: 1_000, 2: 1, 3: 1_000}, rows_max, rotation=turn).keys()
    assert served == {1, 2, 3}
