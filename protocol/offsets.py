"""Half-open ranges of offsets, and a cursor with the ranges acked above it.  Pure.

Invariants
    `cursor` is the first offset not yet acked; the ranges above it are sorted, apart from each other and
    from the cursor (a gap of at least one), so the cursor rises as soon as its gap is filled.
"""

from __future__ import annotations

from bisect import bisect_right

from .errors import InvalidRequestError
from .ids import MAX_I64

Range = tuple[int, int]


class AckedOffsets:
    """What one consumer group has acked of one partition: everything below `cursor`, and ranges above."""

    __slots__ = ("cursor", "_ends", "_starts")

    def __init__(self, cursor: int = 0, ranges: list[Range] | None = None) -> None:
        self.cursor = cursor
        self._starts: list[int] = []
        self._ends: list[int] = []
        for start, end in ranges or []:
            self.add(start, end)

    def add(self, start: int, end: int) -> bool:
        """
        Mark `[start, end)` as acked.

        Returns:
            True if anything was new.

        Raises:
            InvalidRequestError: not `0 <= start < end`.
        """
        if not 0 <= start < end <= MAX_I64:
            raise InvalidRequestError(f"not a range of offsets: [{start}, {end})")
        if start <= self.cursor:
            if end <= self.cursor:
                return False
            self.cursor = end
            self._absorb()
            return True
        starts, ends = self._starts, self._ends
        index = bisect_right(starts, start)
        if index and ends[index - 1] >= start:
            index -= 1
            if ends[index] >= end:
                return False
            start = starts[index]
        last = index
        while last < len(starts) and starts[last] <= end:
            end = max(end, ends[last])
            last += 1
        starts[index:last] = [start]
        ends[index:last] = [end]
        return True

    def _absorb(self) -> None:
        starts, ends = self._starts, self._ends
        count = bisect_right(starts, self.cursor)
        if count:
            self.cursor = max(self.cursor, ends[count - 1])
            del starts[:count], ends[:count]

    @property
    def ranges(self) -> list[Range]:
        """The acked ranges above the cursor, sorted."""
        return list(zip(self._starts, self._ends, strict=True))

    @property
    def range_count(self) -> int:
        """How many ranges there are above the cursor."""
        return len(self._starts)

    def unacked(self, start: int, end: int) -> int:
        """How many offsets of `[start, end)` are not acked."""
        count, offset = 0, self.next_unacked(start)
        while offset < end:
            upto = min(end, self.next_acked(offset))
            count += upto - offset
            offset = self.next_unacked(upto)
        return count

    def __contains__(self, offset: int) -> bool:
        if offset < self.cursor:
            return True
        index = bisect_right(self._starts, offset)
        return index > 0 and offset < self._ends[index - 1]

    def next_acked(self, offset: int) -> int:
        """The first offset at or above `offset`, and above the cursor, that is acked; 2**63 - 1 if there is none."""
        index = bisect_right(self._starts, offset)
        if index and offset < self._ends[index - 1]:
            return offset
        return self._starts[index] if index < len(self._starts) else MAX_I64

    def next_unacked(self, offset: int) -> int:
        """The first offset at or above `offset` that is not acked."""
        if offset < self.cursor:
            return self.cursor
        index = bisect_right(self._starts, offset)
        return self._ends[index - 1] if index and offset < self._ends[index - 1] else offset
