"""AckedOffsets behaves as a plain set of offsets would."""

from __future__ import annotations

import itertools

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from keylane.protocol.offsets import AckedOffsets

SPACE = 60
offsets = st.integers(0, SPACE - 1)


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
TestAckedOffsets.settings = settings(max_examples=120, stateful_step_count=40, deadline=None)
