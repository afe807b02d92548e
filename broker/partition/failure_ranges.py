"""Records how and when each loose message has failed: ranges of offsets with the same facts, and
interned error texts. Pure.

    put, forget ─▶ FailureRanges: [first offset, since, at, fault, next try],
                   one row for adjacent messages with the same facts
    Failure     ─▶ FaultTable: a number for each combination of type, text, consumer and attempts

Invariants
    A range extends to the next range; it is meaningless for offsets in between that are not parked.
    A row with known facts has at least one parked message: `clear_marks` removes the others.
    Unknown facts are reported as unknown, and never replaced by those of another message.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from ...protocol.parked import FAILURE_RANGES_MAX, FAULT_CHARS_MAX, FAULTS_MAX, Failure, Fault
from .offset_ranges import OffsetRanges

COMPACT_MIN_ROWS = 1_024
UNKNOWN_FAULT = 0


class Mark(NamedTuple):
    """The known facts about the messages of a range; 0 means unknown."""

    since_ms: int
    """When they were parked, by the broker's wall clock, in milliseconds since 1970."""
    at_ms: int
    """When they last failed, by the consumer's wall clock, in milliseconds since 1970."""
    fault: int
    """The number of the fault in `FaultTable`."""
    retry_at_ms: int = 0
    """When they are retried, as their owner reported, in milliseconds since 1970."""


UNKNOWN = Mark(0, 0, UNKNOWN_FAULT)
MarkedRange = tuple[int, int, Mark]
"""The start and end of a range, and the facts about its messages."""


class RetryTimes(NamedTuple):
    """The times of the next tries of messages, by row."""

    starts: array[int]
    retry_times: array[int]
    end: int

    def rows(self) -> Iterator[tuple[int, int, int]]:
        """Yield the start, end and time of each row with a known time."""
        ends = [*self.starts, self.end][1:]
        for start, end, retry_at_ms in zip(self.starts, ends, self.retry_times, strict=True):
            if retry_at_ms:
                yield start, end, retry_at_ms


class FailureRanges:
    """The facts about the failed messages of one key and source."""

    __slots__ = (
        "_failure_times",
        "_end",
        "_faults",
        "_head_index",
        "_retry_times",
        "_parked_times",
        "_starts",
    )

    def __init__(self) -> None:
        self._starts = array("q")
        self._parked_times = array("q")
        self._failure_times = array("q")
        self._faults = array("q")
        self._retry_times = array("q")
        self._head_index = 0
        """The index of the first row; the ones before it are removed."""
        self._end = 0
        """The offset after the last range."""

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self._starts) - self._head_index

    @property
    def end(self) -> int:
        """The offset after the last range."""
        return self._end

    @property
    def _columns(self) -> tuple[array[int], ...]:
        return (
            self._starts,
            self._parked_times,
            self._failure_times,
            self._faults,
            self._retry_times,
        )

    def _mark_in_row(self, row: int) -> Mark:
        """Return the facts in a row, or UNKNOWN if it is before the first one."""
        if row < self._head_index:
            return UNKNOWN
        return Mark(
            self._parked_times[row],
            self._failure_times[row],
            self._faults[row],
            self._retry_times[row],
        )

    def mark_at(self, offset: int) -> Mark:
        """Return the facts about one message."""
        if offset >= self._end:
            return UNKNOWN
        return self._mark_in_row(bisect_right(self._starts, offset, self._head_index) - 1)

    def marks_in(self, start: int, end: int) -> list[MarkedRange]:
        """Return the facts about `[start, end)`, as contiguous ranges."""
        low, limit = start, min(end, self._end)
        marked_ranges: list[MarkedRange] = []
        row = bisect_right(self._starts, start, self._head_index) - 1
        while low < limit:
            next_row = row + 1
            high = self._starts[next_row] if next_row < len(self._starts) else limit
            marked_ranges.append((low, min(high, limit), self._mark_in_row(row)))
            low, row = high, next_row
        if low < end:
            marked_ranges.append((max(low, start), end, UNKNOWN))
        return marked_ranges

    def rows(self, first: int, count: int) -> Iterator[MarkedRange]:
        """Yield up to `count` rows, beginning with the `first`th, as contiguous ranges."""
        begin = self._head_index + first
        for row in range(begin, min(begin + count, len(self._starts))):
            is_last = row + 1 == len(self._starts)
            end = self._end if is_last else self._starts[row + 1]
            yield self._starts[row], end, self._mark_in_row(row)

    def set_mark(
        self, start: int, end: int, mark: Mark, parked: OffsetRanges | None = None
    ) -> None:
        """
        Set the facts about `[start, end)`.

        Args:
            parked: the parked messages. If a row only covers a gap between them after the change,
                its next try is removed.
        """
        first_row = bisect_left(self._starts, start, self._head_index)
        end_row = bisect_left(self._starts, end, first_row)
        new_rows: list[tuple[int, Mark]] = []
        if mark != self._mark_in_row(first_row - 1):
            new_rows.append((start, mark))
        if end < self._end:
            row_begins = end_row < len(self._starts) and self._starts[end_row] == end
            next_mark = self._mark_in_row(end_row if row_begins else end_row - 1)
            if next_mark == mark:
                end_row += row_begins
            elif not row_begins:
                new_rows.append((end, next_mark))
        self._splice(first_row, end_row, new_rows)
        self._end = max(self._end, end)
        if parked is not None and self.mark_at(end).retry_at_ms:
            _, next_parked = parked.gap_around(end, end)
            if next_parked is None or end < next_parked:
                self.set_mark(end, self._end if next_parked is None else next_parked, UNKNOWN)

    def _splice(self, first_row: int, end_row: int, new_rows: list[tuple[int, Mark]]) -> None:
        if first_row == self._head_index and len(new_rows) <= end_row - first_row:
            # At the front, overwrite the last of the replaced rows.
            self._head_index = first_row = end_row - len(new_rows)
        rows = [(start, *mark) for start, mark in new_rows]
        for index, column in enumerate(self._columns):
            column[first_row:end_row] = array("q", [row[index] for row in rows])
        if self._head_index >= COMPACT_MIN_ROWS and 2 * self._head_index > len(self._starts):
            for column in self._columns:
                del column[: self._head_index]
            self._head_index = 0

    def clear_marks(self, start: int, end: int, parked: OffsetRanges) -> None:
        """Forget the facts about `[start, end)`, which has no `parked` message any more, and about
        the gap around it.
        """
        low, high = parked.gap_around(start, end)
        low = min(start, self._starts[self._head_index]) if low is None and self else low or start
        high = self._end if high is None else high
        if low < high:
            self.set_mark(low, high, UNKNOWN)

    def clear_retry_times(self) -> RetryTimes:
        """Forget the times of the next tries, and return them."""
        starts, retry_times = (
            self._starts[self._head_index :],
            self._retry_times[self._head_index :],
        )
        self._retry_times = array("q", bytes(8 * len(self._starts)))
        return RetryTimes(starts, retry_times, self._end)

    @property
    def retry_at_ms(self) -> int | None:
        """The earliest known time of a next try, in milliseconds since 1970, or None."""
        return min(
            (time_ms for time_ms in self._retry_times[self._head_index :] if time_ms), default=None
        )

    @property
    def faults(self) -> set[int]:
        """The numbers of the faults in the rows."""
        return set(self._faults[self._head_index :])

    def renumber_faults(self, new_numbers: dict[int, int]) -> None:
        """Replace the numbers of some faults."""
        self._faults = array("q", [new_numbers.get(fault, fault) for fault in self._faults])

    def merge_oldest_ranges(self) -> None:
        """
        Reduce the number of ranges at the cost of details about the oldest messages.

        In the older half, two adjacent rows with the same fault are merged, with the later of their
        times. If that saves too little, the facts about the oldest quarter are forgotten.
        """
        row_count = len(self)
        half = row_count // 2
        rows = list(self.rows(0, half))
        merged_rows: list[tuple[int, Mark]] = []
        index = 0
        while index < half:
            start, _, mark = rows[index]
            index += 1
            if index < half and rows[index][2].fault == mark.fault:
                mark = _merge_marks(mark, rows[index][2])
                index += 1
            merged_rows.append((start, mark))
        self._splice(self._head_index, self._head_index + half, merged_rows)
        if len(self) > row_count - row_count // 8:
            quarter = len(self) // 4
            start = self._starts[self._head_index]
            self._splice(self._head_index, self._head_index + quarter, [(start, UNKNOWN)])

    def pack(self) -> tuple[bytes, bytes, bytes, bytes, bytes]:
        """Return the columns as bytes, 8 per row: the first offset, the time of parking, that of
        the last failure, the fault, and the time of the next try.
        """
        starts, parked_times, failure_times, faults, next_tries = (
            column[self._head_index :].tobytes() for column in self._columns
        )
        return starts, parked_times, failure_times, faults, next_tries

    @classmethod
    def from_packed(cls, columns: Iterable[bytes], end: int) -> FailureRanges:
        """Decode the result of `pack`, or raise ValueError."""
        decoded = cls()
        packed_columns = list(columns)
        for column, packed_column in zip(decoded._columns, packed_columns, strict=True):
            column.frombytes(packed_column)
        if len({len(packed_column) for packed_column in packed_columns}) > 1:
            raise ValueError("columns of different lengths")
        decoded._end = end
        return decoded


def _merge_marks(mark: Mark, other: Mark) -> Mark:
    retry_times = [time_ms for time_ms in (mark.retry_at_ms, other.retry_at_ms) if time_ms]
    return Mark(
        max(mark.since_ms, other.since_ms),
        max(mark.at_ms, other.at_ms),
        mark.fault,
        min(retry_times, default=0),
    )


class FaultTable:
    """Assigns a number to each distinct failure, with its type and text. `UNKNOWN_FAULT` stands for
    none.
    """

    __slots__ = ("_by_number", "_char_count", "_last_number", "_numbers")

    def __init__(self) -> None:
        self._numbers: dict[Fault, int] = {}
        self._by_number: dict[int, Fault] = {}
        self._char_count = 0
        self._last_number = UNKNOWN_FAULT
        """The last number in use; numbers are never reused."""

    def __len__(self) -> int:
        return len(self._numbers)

    def intern(self, fault: Fault | None) -> int:
        """Return the number of a fault, after adding the fault if it is new."""
        if fault is None:
            return UNKNOWN_FAULT
        number = self._numbers.get(fault)
        if number is None:
            number = self._last_number + 1
            self._add(number, fault)
        return number

    def _add(self, number: int, fault: Fault) -> None:
        self._numbers[fault] = number
        self._by_number[number] = fault
        self._char_count += _count_chars(fault)
        self._last_number = max(self._last_number, number)

    def get(self, number: int) -> Fault | None:
        """Return the fault with this number, or None if it was forgotten."""
        return self._by_number.get(number)

    def failure(self, mark: Mark) -> Failure | None:
        """Return the failure that a mark describes, or None if its fault is unknown."""
        fault = self._by_number.get(mark.fault)
        if fault is None:
            return None
        return Failure(fault.kind, fault.text, fault.client, mark.at_ms, fault.attempts)

    def intern_failure(self, failure: Failure | None) -> int:
        """Return the number of a failure's fault, after adding the fault if it is new."""
        if failure is None:
            return UNKNOWN_FAULT
        return self.intern(Fault(failure.kind, failure.text, failure.client, failure.attempts))

    @property
    def is_over_limit(self) -> bool:
        """True if a limit is exceeded, and `prune` must be called."""
        return len(self._numbers) > FAULTS_MAX or self._char_count > FAULT_CHARS_MAX

    def prune(self, used_numbers: set[int]) -> dict[int, int]:
        """
        Forget first the unused faults, then the texts of the oldest faults, then the oldest faults
        themselves, until a quarter of the capacity is free.

        Returns:
            A dict that maps each changed number to the number that replaces it.
        """
        for number in self._by_number.keys() - used_numbers:
            self._forget(number)
        new_numbers: dict[int, int] = {}
        for number, fault in self.list_numbered():
            if fault.text and not self._is_below_target:
                self._forget(number)
                without_text = Fault(fault.kind, "", fault.client, fault.attempts)
                new_numbers[number] = self.intern(without_text)
        for number, _ in self.list_numbered():
            if not self._is_below_target:
                self._forget(number)
                new_numbers[number] = UNKNOWN_FAULT
        return {
            number: new_numbers.get(new_number, new_number)
            for number, new_number in new_numbers.items()
        }

    @property
    def _is_below_target(self) -> bool:
        return (
            4 * len(self._numbers) <= 3 * FAULTS_MAX and 4 * self._char_count <= 3 * FAULT_CHARS_MAX
        )

    def _forget(self, number: int) -> Fault:
        fault = self._by_number.pop(number)
        del self._numbers[fault]
        self._char_count -= _count_chars(fault)
        return fault

    def list_numbered(self) -> list[tuple[int, Fault]]:
        """Return every fault with its number."""
        return list(self._by_number.items())

    @classmethod
    def from_items(cls, numbered_faults: Iterable[tuple[int, Fault]]) -> FaultTable:
        """Create a table from the result of `list_numbered`."""
        faults = cls()
        for number, fault in numbered_faults:
            faults._add(number, fault)
        return faults


def _count_chars(fault: Fault) -> int:
    return len(fault.kind) + len(fault.text) + len(fault.client)


def exceeds_range_limit(all_failures: Iterable[FailureRanges]) -> bool:
    """Return True if the ranges of a key exceed FAILURE_RANGES_MAX."""
    return sum(map(len, all_failures)) > FAILURE_RANGES_MAX
