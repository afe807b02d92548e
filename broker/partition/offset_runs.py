"""A set of offsets as half-open runs in two arrays, which holds a million offsets in 16 MB: offsets
are removed at the front and added at the end. Pure.

Invariants
    Runs are sorted; between two runs lies at least one offset.
    Removing the first runs does not move the others: a head index rises, and the arrays shrink now
    and then.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from itertools import islice

from ...protocol.offsets import Range

SHRINK_AT = 1_024


class OffsetRuns:
    """A set of offsets; `messages` is their number."""

    __slots__ = ("_ends", "_head", "_starts", "messages")

    def __init__(self, ranges: Iterable[Range] = ()) -> None:
        self._starts = array("q")
        self._ends = array("q")
        self._head = 0
        self.messages = 0
        for start, end in ranges:
            self.add(start, end)

    def __bool__(self) -> bool:
        return self._head < len(self._starts)

    def __iter__(self) -> Iterator[Range]:
        """Return an iterator over the runs, by offset."""
        head = self._head
        return zip(islice(self._starts, head, None), islice(self._ends, head, None), strict=True)

    @property
    def runs(self) -> int:
        """The number of runs."""
        return len(self._starts) - self._head

    def some(self, first: int, count: int) -> Iterator[Range]:
        """Return an iterator over up to `count` runs from the `first`th on."""
        low = self._head + first
        return zip(self._starts[low : low + count], self._ends[low : low + count], strict=True)

    def within(self, start: int, end: int) -> list[Range]:
        """Return the parts of `[start, end)` that are in the set."""
        first = bisect_right(self._ends, start, self._head)
        last = bisect_left(self._starts, end, first)
        runs = zip(self._starts[first:last], self._ends[first:last], strict=True)
        return [(max(low, start), min(high, end)) for low, high in runs]

    def place_of(self, offset: int) -> int:
        """Return the number of runs that end at this offset or before it."""
        return bisect_right(self._ends, offset, self._head) - self._head

    def gap(self, start: int, end: int) -> tuple[int | None, int | None]:
        """Return the end of the run before `[start, end)`, which has no offset in the set, and the
        start of the run after it.
        """
        place = bisect_right(self._ends, start, self._head)
        before = self._ends[place - 1] if place > self._head else None
        return before, self._starts[place] if place < len(self._starts) else None

    def packed(self) -> tuple[bytes, bytes]:
        """Return the starts and the ends as bytes, 8 each."""
        return self._starts[self._head :].tobytes(), self._ends[self._head :].tobytes()

    @classmethod
    def of_packed(cls, starts: bytes, ends: bytes) -> OffsetRuns:
        """Return the set that `packed` has encoded, or raise ValueError."""
        runs = cls()
        runs._starts.frombytes(starts)
        runs._ends.frombytes(ends)
        if len(starts) != len(ends):
            raise ValueError(f"{len(starts)} bytes of starts, {len(ends)} of ends")
        runs.messages = sum(runs._ends) - sum(runs._starts)
        return runs

    @property
    def first(self) -> int:
        """The lowest offset; there must be one."""
        return self._starts[self._head]

    def add(self, start: int, end: int) -> list[Range]:
        """Add `[start, end)`, and return the parts of it that are new."""
        starts, ends = self._starts, self._ends
        if not self or start > ends[-1]:
            starts.append(start)
            ends.append(end)
            self.messages += end - start
            return [(start, end)]
        first = bisect_left(ends, start, self._head)
        last = bisect_right(starts, end, first)
        new = list(_gaps(zip(starts[first:last], ends[first:last], strict=True), start, end))
        if first < last:
            start, end = min(start, starts[first]), max(end, ends[last - 1])
        starts[first:last] = array("q", (start,))
        ends[first:last] = array("q", (end,))
        self.messages += sum(high - low for low, high in new)
        return new

    def remove(self, start: int, end: int) -> list[Range]:
        """Remove `[start, end)`, and return the parts of it that were in the set."""
        starts, ends = self._starts, self._ends
        first = bisect_right(ends, start, self._head)
        last = bisect_left(starts, end, first)
        if first >= last:
            return []
        gone = self.within(start, end)
        left = []
        if starts[first] < start:
            left.append((starts[first], start))
        if ends[last - 1] > end:
            left.append((end, ends[last - 1]))
        if first == self._head and len(left) <= last - first:
            # At the front, the kept parts take the place of the last removed runs.
            self._head = last - len(left)
            for place, (low, high) in enumerate(left, self._head):
                starts[place], ends[place] = low, high
            if self._head >= SHRINK_AT and 2 * self._head > len(starts):
                del starts[: self._head], ends[: self._head]
                self._head = 0
        else:
            starts[first:last] = array("q", (low for low, _ in left))
            ends[first:last] = array("q", (high for _, high in left))
        self.messages -= sum(high - low for low, high in gone)
        return gone


def _gaps(runs: Iterable[Range], start: int, end: int) -> Iterator[Range]:
    """Yield the parts of `[start, end)` outside of sorted runs."""
    for low, high in runs:
        if start < low:
            yield start, min(low, end)
        start = max(start, high)
    if start < end:
        yield start, end
