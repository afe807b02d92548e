"""Sets of offsets as half-open ranges, and cursors with the acked ranges above them. Pure.

Invariants
    The ranges of a set are sorted, with at least one offset between any two of them.
    `cursor` is the first offset that is not acked. At least one offset lies between the cursor and
    the ranges above it; when that gap is filled, the cursor rises.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator

from .errors import InvalidRequestError
from .ids import MAX_I64

Range = tuple[int, int]


class IntervalSet:
    """A set of offsets as half-open ranges `(start, end)` with `start < end`. Ranges that touch or
    overlap are joined.
    """

    __slots__ = ("_ends", "_starts")

    def __init__(self, ranges: Iterable[Range] = ()) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []
        for start, end in ranges:
            self.add(start, end)

    def add(self, start: int, end: int) -> bool:
        """Add `[start, end)`, and return True if any of it is new."""
        starts, ends = self._starts, self._ends
        if not ends or start > ends[-1]:
            starts.append(start)
            ends.append(end)
            return True
        first_index = bisect_left(ends, start)
        end_index = bisect_right(starts, end, first_index)
        if first_index < end_index:
            if starts[first_index] <= start and end <= ends[first_index]:
                return False
            start, end = min(start, starts[first_index]), max(end, ends[end_index - 1])
        starts[first_index:end_index] = [start]
        ends[first_index:end_index] = [end]
        return True

    def remove_below(self, offset: int) -> None:
        """Remove every offset below `offset`."""
        count = bisect_right(self._ends, offset)
        del self._starts[:count], self._ends[:count]
        if self._starts:
            self._starts[0] = max(self._starts[0], offset)

    def __len__(self) -> int:
        """Return the number of ranges."""
        return len(self._starts)

    def __iter__(self) -> Iterator[Range]:
        """Yield the ranges in order."""
        return zip(self._starts, self._ends, strict=True)

    def __contains__(self, offset: int) -> bool:
        return self.next_in(offset) == offset

    def next_in(self, offset: int) -> int:
        """Return the first offset of the set at or above `offset`, or 2**63 - 1 if there is
        none.
        """
        index = bisect_right(self._ends, offset)
        return max(offset, self._starts[index]) if index < len(self._starts) else MAX_I64

    def next_out(self, offset: int) -> int:
        """Return the first offset at or above `offset` that is not in the set."""
        index = bisect_right(self._starts, offset)
        return max(offset, self._ends[index - 1]) if index else offset


def subtract_range(start: int, end: int, cut_start: int, cut_end: int) -> Iterator[Range]:
    """Yield the parts of `[start, end)`, at most two, that lie outside `[cut_start, cut_end)`."""
    if start < cut_start:
        yield start, min(end, cut_start)
    if cut_end < end:
        yield max(start, cut_end), end


class AckedOffsets:
    """The offsets of a partition that a consumer group has acked: all below `cursor`, and the
    ranges above it.
    """

    __slots__ = ("_above", "cursor")

    def __init__(self, cursor: int = 0, ranges: Iterable[Range] | None = None) -> None:
        self.cursor = cursor
        self._above = IntervalSet()
        for start, end in ranges or ():
            self.add(start, end)

    def add(self, start: int, end: int) -> bool:
        """
        Mark `[start, end)` as acked.

        Returns:
            True if any of these offsets had not been acked before.

        Raises:
            InvalidRequestError: `0 <= start < end < 2**63` does not hold.
        """
        if not 0 <= start < end <= MAX_I64:
            raise InvalidRequestError(f"not a range of offsets: [{start}, {end})")
        if start > self.cursor:
            return self._above.add(start, end)
        if end <= self.cursor:
            return False
        self.cursor = end
        if self._above:
            self.cursor = self._above.next_out(end)
            self._above.remove_below(self.cursor)
        return True

    @property
    def ranges(self) -> list[Range]:
        """The sorted acked ranges above the cursor."""
        return list(self._above)

    @property
    def range_count(self) -> int:
        """The number of acked ranges above the cursor."""
        return len(self._above)

    def count_unacked(self, start: int, end: int) -> int:
        """Return the number of offsets in `[start, end)` that are not acked."""
        count, offset = 0, self.next_unacked(start)
        while offset < end:
            gap_end = min(end, self.next_acked(offset))
            count += gap_end - offset
            offset = self.next_unacked(gap_end)
        return count

    def __contains__(self, offset: int) -> bool:
        return offset < self.cursor or offset in self._above

    def next_acked(self, offset: int) -> int:
        """Return the first acked offset at or above `offset` and above the cursor, or 2**63 - 1 if
        there is none.
        """
        return self._above.next_in(offset)

    def next_unacked(self, offset: int) -> int:
        """Return the first offset at or above `offset` that is not acked."""
        return self._above.next_out(max(offset, self.cursor))
