"""A set of offsets as half-open runs in two arrays, optimized for removal at the front and addition
at the end. A million runs take 16 MB. Pure.

Invariants
    Runs are sorted, with at least one offset between two of them.
    Removing the first runs does not move the others: a head index rises, and the arrays are
    compacted from time to time.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from itertools import islice

from ...protocol.offsets import Range

COMPACT_MIN_ROWS = 1_024


class OffsetRuns:
    """A set of offsets; `messages` is its size."""

    __slots__ = ("_ends", "_head_index", "_starts", "messages")

    def __init__(self, ranges: Iterable[Range] = ()) -> None:
        self._starts = array("q")
        self._ends = array("q")
        self._head_index = 0
        self.messages = 0
        for start, end in ranges:
            self.add(start, end)

    def __bool__(self) -> bool:
        return self._head_index < len(self._starts)

    def __iter__(self) -> Iterator[Range]:
        """Iterate over the runs by offset."""
        head = self._head_index
        return zip(islice(self._starts, head, None), islice(self._ends, head, None), strict=True)

    @property
    def run_count(self) -> int:
        """The number of runs."""
        return len(self._starts) - self._head_index

    def page(self, first: int, count: int) -> Iterator[Range]:
        """Iterate over up to `count` runs, beginning with run `first`."""
        low = self._head_index + first
        return zip(self._starts[low : low + count], self._ends[low : low + count], strict=True)

    def intersection(self, start: int, end: int) -> list[Range]:
        """Return the intersection with `[start, end)`."""
        first = bisect_right(self._ends, start, self._head_index)
        last = bisect_left(self._starts, end, first)
        runs = zip(self._starts[first:last], self._ends[first:last], strict=True)
        return [(max(low, start), min(high, end)) for low, high in runs]

    def count_runs_before(self, offset: int) -> int:
        """Return the number of runs that end at or before an offset."""
        return bisect_right(self._ends, offset, self._head_index) - self._head_index

    def gap_around(self, start: int, end: int) -> tuple[int | None, int | None]:
        """Return the bounds of the gap around `[start, end)`, which must not intersect the set: the
        end of the previous run and the start of the next run, or None where there is none.
        """
        index = bisect_right(self._ends, start, self._head_index)
        low = self._ends[index - 1] if index > self._head_index else None
        return low, self._starts[index] if index < len(self._starts) else None

    def pack(self) -> tuple[bytes, bytes]:
        """Return the starts and the ends as bytes, 8 per run."""
        return self._starts[self._head_index :].tobytes(), self._ends[self._head_index :].tobytes()

    @classmethod
    def from_packed(cls, starts: bytes, ends: bytes) -> OffsetRuns:
        """Decode the result of `pack`, or raise ValueError."""
        runs = cls()
        runs._starts.frombytes(starts)
        runs._ends.frombytes(ends)
        if len(starts) != len(ends):
            raise ValueError(f"{len(starts)} bytes of starts, {len(ends)} of ends")
        runs.messages = sum(runs._ends) - sum(runs._starts)
        return runs

    @property
    def first(self) -> int:
        """The lowest offset. The set must not be empty."""
        return self._starts[self._head_index]

    def add(self, start: int, end: int) -> list[Range]:
        """Add `[start, end)`, and return the ranges that are new."""
        starts, ends = self._starts, self._ends
        if not self or start > ends[-1]:
            starts.append(start)
            ends.append(end)
            self.messages += end - start
            return [(start, end)]
        first_index = bisect_left(ends, start, self._head_index)
        end_index = bisect_right(starts, end, first_index)
        new_ranges = list(
            _gaps(
                zip(starts[first_index:end_index], ends[first_index:end_index], strict=True),
                start,
                end,
            )
        )
        if first_index < end_index:
            start, end = min(start, starts[first_index]), max(end, ends[end_index - 1])
        starts[first_index:end_index] = array("q", (start,))
        ends[first_index:end_index] = array("q", (end,))
        self.messages += sum(high - low for low, high in new_ranges)
        return new_ranges

    def remove(self, start: int, end: int) -> list[Range]:
        """Remove `[start, end)`, and return the ranges that were in the set."""
        starts, ends = self._starts, self._ends
        first_index = bisect_right(ends, start, self._head_index)
        end_index = bisect_left(starts, end, first_index)
        if first_index >= end_index:
            return []
        removed_ranges = self.intersection(start, end)
        remaining_ranges = []
        if starts[first_index] < start:
            remaining_ranges.append((starts[first_index], start))
        if ends[end_index - 1] > end:
            remaining_ranges.append((end, ends[end_index - 1]))
        if first_index == self._head_index and len(remaining_ranges) <= end_index - first_index:
            # At the front, overwrite the last of the removed runs.
            self._head_index = end_index - len(remaining_ranges)
            for index, (low, high) in enumerate(remaining_ranges, self._head_index):
                starts[index], ends[index] = low, high
            if self._head_index >= COMPACT_MIN_ROWS and 2 * self._head_index > len(starts):
                del starts[: self._head_index], ends[: self._head_index]
                self._head_index = 0
        else:
            starts[first_index:end_index] = array("q", (low for low, _ in remaining_ranges))
            ends[first_index:end_index] = array("q", (high for _, high in remaining_ranges))
        self.messages -= sum(high - low for low, high in removed_ranges)
        return removed_ranges


def _gaps(runs: Iterable[Range], start: int, end: int) -> Iterator[Range]:
    """Yield the parts of `[start, end)` that lie outside the sorted runs."""
    for low, high in runs:
        if start < low:
            yield start, min(low, end)
        start = max(start, high)
    if start < end:
        yield start, end
