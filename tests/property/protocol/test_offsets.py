"""IntervalSet and AckedOffsets behave as a plain set of offsets would."""

from __future__ import annotations

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from keylane.protocol.ids import MAX_I64
from keylane.protocol.offsets import AckedOffsets, IntervalSet, subtract_range
from support.running.examples import examples

SPACE = 60
offsets = st.integers(0, SPACE - 1)


class IntervalSetAgainstASet(RuleBasedStateMachine):
    """Each operation is done to both; then both must say the same."""

    def __init__(self) -> None:
        super().__init__()
        self.intervals = IntervalSet()
        self.model: set[int] = set()

    @rule(start=offsets, count=st.integers(1, 12))
    def add(self, start: int, count: int) -> None:
        added = set(range(start, start + count))
        assert self.intervals.add(start, start + count) == (not added <= self.model)
        self.model |= added

    @rule(offset=st.integers(0, SPACE + 20))
    def remove_below(self, offset: int) -> None:
        self.intervals.remove_below(offset)
        self.model = {kept for kept in self.model if kept >= offset}

    @rule(offset=st.integers(0, SPACE + 20))
    def ask(self, offset: int) -> None:
        assert (offset in self.intervals) == (offset in self.model)
        following = [kept for kept in self.model if kept >= offset]
        assert self.intervals.next_in(offset) == min(following, default=MAX_I64)
        expected = offset
        while expected in self.model:
            expected += 1
        assert self.intervals.next_out(offset) == expected

    @invariant()
    def same_as_the_set(self) -> None:
        ranges = list(self.intervals)
        assert {o for start, end in ranges for o in range(start, end)} == self.model
        assert len(self.intervals) == len(ranges)
        edges = [edge for pair in ranges for edge in pair]
        assert all(a < b for a, b in itertools.pairwise(edges))
        assert list(IntervalSet(reversed(ranges))) == ranges


TestIntervalSet = IntervalSetAgainstASet.TestCase
TestIntervalSet.settings = settings(
    max_examples=examples(120), stateful_step_count=40, deadline=None
)


@given(start=offsets, count=st.integers(1, 12), cut_start=offsets, cut_count=st.integers(1, 12))
def test_outside_gives_what_a_cut_leaves_of_a_range(start, count, cut_start, cut_count):
    """The parts are in order, none is empty, and together they are the range without the cut."""
    parts = list(subtract_range(start, start + count, cut_start, cut_start + cut_count))
    left = [offset for part in parts for offset in range(*part)]
    cut = range(cut_start, cut_start + cut_count)
    assert left == [offset for offset in range(start, start + count) if offset not in cut]
    assert all(low < high for low, high in parts)


class AckedOffsetsAgainstASet(RuleBasedStateMachine):
    """Each operation is done to both; then both must say the same."""

    def __init__(self) -> None:
        super().__init__()
        self.acked = AckedOffsets()
        self.model: set[int] = set()
        self.cursor_before = 0

    @rule(start=offsets, count=st.integers(1, 12))
    def add(self, start: int, count: int) -> None:
        given_now = set(range(start, start + count))
        assert self.acked.add(start, start + count) == (not given_now <= self.model)
        self.model |= given_now

    @precondition(lambda self: self.model)
    @rule()
    def rebuild(self) -> None:
        """A broker that starts again gives the cursor and the ranges back."""
        self.acked = AckedOffsets(self.acked.cursor, self.acked.ranges)

    @rule(offset=st.integers(0, SPACE + 20))
    def ask(self, offset: int) -> None:
        assert (offset in self.acked) == (offset in self.model)
        expected = offset
        while expected in self.model:
            expected += 1
        assert self.acked.next_unacked(offset) == expected

    @invariant()
    def same_as_the_set(self) -> None:
        ranges = self.acked.ranges
        cursor = self.acked.cursor
        assert set(range(cursor)) | {o for a, b in ranges for o in range(a, b)} == self.model
        assert cursor not in self.model
        assert cursor >= self.cursor_before
        self.cursor_before = cursor
        edges = [cursor, *(edge for pair in ranges for edge in pair)]
        assert all(a < b for a, b in itertools.pairwise(edges))


TestAckedOffsets = AckedOffsetsAgainstASet.TestCase
TestAckedOffsets.settings = settings(
    max_examples=examples(120), stateful_step_count=40, deadline=None
)
