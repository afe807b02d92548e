"""Records how and when each message without an order has failed: runs of offsets with one answer,
and texts that are kept once. Pure.

    put, forget ─▶ FailureRuns: [from this offset on: since, at, fault, next try],
                   one row for neighbours with the same answer
    Failure     ─▶ Faults: a number for each type, text, consumer and count of tries

Invariants
    A run says nothing about offsets that are not parked: it extends over them to the next run.
    A row that says something has a parked message: `forget` removes the others.
    Unknown facts are reported as unknown; a message never gets what was said about another.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from ...protocol.parked import FAILURE_RUNS_MAX, FAULT_CHARS_MAX, FAULTS_MAX, Failure, Fault
from .offset_runs import OffsetRuns

SHRINK_AT = 1_024
UNKNOWN_FAULT = 0


class Mark(NamedTuple):
    """The known facts about the messages of a run; 0 means unknown."""

    since_ms: int
    """The time at which they were set aside, by the broker's calendar."""
    at_ms: int
    """The time at which they failed last, by the consumer's calendar."""
    fault: int
    """The number of their fault in `Faults`."""
    next_ms: int = 0
    """The time at which they are tried again, as their owner reported."""


UNKNOWN = Mark(0, 0, UNKNOWN_FAULT)
Marked = tuple[int, int, Mark]
"""The start, the end, and the known facts about the offsets in between."""


class Tries(NamedTuple):
    """The times at which messages are tried again, by row."""

    starts: array[int]
    nexts: array[int]
    end: int

    def rows(self) -> Iterator[tuple[int, int, int]]:
        """Yield the start, end and time of each row that has a time."""
        ends = [*self.starts, self.end][1:]
        for start, end, next_ms in zip(self.starts, ends, self.nexts, strict=True):
            if next_ms:
                yield start, end, next_ms


class FailureRuns:
    """The known facts about the messages of one key and source."""

    __slots__ = ("_ats", "_end", "_faults", "_head", "_nexts", "_sinces", "_starts")

    def __init__(self) -> None:
        self._starts = array("q")
        self._sinces = array("q")
        self._ats = array("q")
        self._faults = array("q")
        self._nexts = array("q")
        self._head = 0
        """The index of the first row that was not removed."""
        self._end = 0
        """The end offset: nothing is known about offsets from here on."""

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self._starts) - self._head

    @property
    def end(self) -> int:
        """The end offset: nothing is known about offsets from here on."""
        return self._end

    @property
    def _columns(self) -> tuple[array[int], ...]:
        return self._starts, self._sinces, self._ats, self._faults, self._nexts

    def _row(self, place: int) -> Mark:
        """Return the facts in the row at `place`. Before the first row nothing is known."""
        if place < self._head:
            return UNKNOWN
        return Mark(self._sinces[place], self._ats[place], self._faults[place], self._nexts[place])

    def at(self, offset: int) -> Mark:
        """Return the known facts about a message."""
        if offset >= self._end:
            return UNKNOWN
        return self._row(bisect_right(self._starts, offset, self._head) - 1)

    def within(self, start: int, end: int) -> list[Marked]:
        """Return the known facts about `[start, end)`, in parts that follow each other."""
        low, upto = start, min(end, self._end)
        marked: list[Marked] = []
        place = bisect_right(self._starts, start, self._head) - 1
        while low < upto:
            following = place + 1
            high = self._starts[following] if following < len(self._starts) else upto
            marked.append((low, min(high, upto), self._row(place)))
            low, place = high, following
        if low < end:
            marked.append((max(low, start), end, UNKNOWN))
        return marked

    def rows(self, first: int, count: int) -> Iterator[Marked]:
        """Yield up to `count` rows from the `first`th on, as parts that follow each other."""
        begin = self._head + first
        for place in range(begin, min(begin + count, len(self._starts))):
            last = place + 1 == len(self._starts)
            end = self._end if last else self._starts[place + 1]
            yield self._starts[place], end, self._row(place)

    def put(self, start: int, end: int, mark: Mark, present: OffsetRuns | None = None) -> None:
        """
        Record these facts about `[start, end)`.

        Args:
            present: the messages. A row extends over a gap between them; it no longer names a next
                try there once its messages have another.
        """
        first = bisect_left(self._starts, start, self._head)
        last = bisect_left(self._starts, end, first)
        new: list[tuple[int, Mark]] = []
        if mark != self._row(first - 1):
            new.append((start, mark))
        if end < self._end:
            follows = last < len(self._starts) and self._starts[last] == end
            following = self._row(last if follows else last - 1)
            if following == mark:
                last += follows
            elif not follows:
                new.append((end, following))
        self._splice(first, last, new)
        self._end = max(self._end, end)
        if present is not None and self.at(end).next_ms:
            _, behind = present.gap(end, end)
            if behind is None or end < behind:
                self.put(end, self._end if behind is None else behind, UNKNOWN)

    def _splice(self, first: int, last: int, new: list[tuple[int, Mark]]) -> None:
        if first == self._head and len(new) <= last - first:
            # At the front, the new rows take the place of the last ones.
            self._head = first = last - len(new)
        rows = [(start, *mark) for start, mark in new]
        for place, column in enumerate(self._columns):
            column[first:last] = array("q", [row[place] for row in rows])
        if self._head >= SHRINK_AT and 2 * self._head > len(self._starts):
            for column in self._columns:
                del column[: self._head]
            self._head = 0

    def forget(self, start: int, end: int, present: OffsetRuns) -> None:
        """Forget the facts about those offsets of `[start, end)` where `present` has no message,
        and about the gap around them.
        """
        low, high = present.gap(start, end)
        low = min(start, self._starts[self._head]) if low is None and self else low or start
        high = self._end if high is None else high
        if low < high:
            self.put(low, high, UNKNOWN)

    def forget_tries(self) -> Tries:
        """Forget when messages are tried again, and return the known times."""
        starts, nexts = self._starts[self._head :], self._nexts[self._head :]
        self._nexts = array("q", bytes(8 * len(self._starts)))
        return Tries(starts, nexts, self._end)

    @property
    def next_ms(self) -> int | None:
        """The first known time at which one of the messages is tried again."""
        return min((at_ms for at_ms in self._nexts[self._head :] if at_ms), default=None)

    @property
    def faults(self) -> set[int]:
        """The numbers of the faults in the rows."""
        return set(self._faults[self._head :])

    def rename(self, names: dict[int, int]) -> None:
        """Replace some faults by others."""
        self._faults = array("q", [names.get(fault, fault) for fault in self._faults])

    def coarsen(self) -> None:
        """
        Keep less about the oldest messages, because there are too many runs.

        In the older half, two neighbours with one fault get the later of their times. If that saves
        too little, the facts about the oldest quarter are forgotten.
        """
        before = len(self)
        half = before // 2
        rows = list(self.rows(0, half))
        left: list[tuple[int, Mark]] = []
        place = 0
        while place < half:
            start, _, mark = rows[place]
            place += 1
            if place < half and rows[place][2].fault == mark.fault:
                mark = _later(mark, rows[place][2])
                place += 1
            left.append((start, mark))
        self._splice(self._head, self._head + half, left)
        if len(self) > before - before // 8:
            quarter = len(self) // 4
            start = self._starts[self._head]
            self._splice(self._head, self._head + quarter, [(start, UNKNOWN)])

    def packed(self) -> tuple[bytes, ...]:
        """Return the columns as bytes, 8 for each row: starts, since, at, faults, next tries."""
        return tuple(column[self._head :].tobytes() for column in self._columns)

    @classmethod
    def of_packed(cls, columns: Iterable[bytes], end: int) -> FailureRuns:
        """Return the runs that `packed` has encoded, or raise ValueError."""
        runs = cls()
        packed = list(columns)
        for column, part in zip(runs._columns, packed, strict=True):
            column.frombytes(part)
        if len({len(part) for part in packed}) > 1:
            raise ValueError("columns of different lengths")
        runs._end = end
        return runs


def _later(mark: Mark, other: Mark) -> Mark:
    tries = [at_ms for at_ms in (mark.next_ms, other.next_ms) if at_ms]
    return Mark(
        max(mark.since_ms, other.since_ms),
        max(mark.at_ms, other.at_ms),
        mark.fault,
        min(tries, default=0),
    )


class Faults:
    """Types and texts of failures, each kept once under a number; `UNKNOWN_FAULT` is the number of
    no fault.
    """

    __slots__ = ("_by_number", "_chars", "_last", "_numbers")

    def __init__(self) -> None:
        self._numbers: dict[Fault, int] = {}
        self._by_number: dict[int, Fault] = {}
        self._chars = 0
        self._last = UNKNOWN_FAULT
        """The last number that was given; no number is used twice."""

    def __len__(self) -> int:
        return len(self._numbers)

    def number(self, fault: Fault | None) -> int:
        """Return the number of a fault, which may be a new one."""
        if fault is None:
            return UNKNOWN_FAULT
        number = self._numbers.get(fault)
        if number is None:
            number = self._last + 1
            self._add(number, fault)
        return number

    def _add(self, number: int, fault: Fault) -> None:
        self._numbers[fault] = number
        self._by_number[number] = fault
        self._chars += _chars(fault)
        self._last = max(self._last, number)

    def get(self, number: int) -> Fault | None:
        """Return the fault with this number, or None if it is no longer known."""
        return self._by_number.get(number)

    def failure(self, mark: Mark) -> Failure | None:
        """Return the failure that a mark refers to."""
        fault = self._by_number.get(mark.fault)
        if fault is None:
            return None
        return Failure(fault.kind, fault.text, fault.client, mark.at_ms, fault.attempts)

    def number_of(self, failure: Failure | None) -> int:
        """Return the number of a failure, regardless of its time."""
        return UNKNOWN_FAULT if failure is None else self.number(fault_of(failure))

    @property
    def too_many(self) -> bool:
        """True if some faults have to be forgotten."""
        return len(self._numbers) > FAULTS_MAX or self._chars > FAULT_CHARS_MAX

    def keep(self, used: set[int]) -> dict[int, int]:
        """
        Forget the faults that are not used, and the texts of the oldest, until a quarter of the
        room is free.

        Returns:
            Number → the number that replaces it.
        """
        for number in self._by_number.keys() - used:
            self._forget(number)
        names: dict[int, int] = {}
        for number, fault in self.all():
            if fault.text and not self._has_room:
                self._forget(number)
                names[number] = self.number(Fault(fault.kind, "", fault.client, fault.attempts))
        for number, _ in self.all():
            if not self._has_room:
                self._forget(number)
                names[number] = UNKNOWN_FAULT
        return {number: names.get(other, other) for number, other in names.items()}

    @property
    def _has_room(self) -> bool:
        return 4 * len(self._numbers) <= 3 * FAULTS_MAX and 4 * self._chars <= 3 * FAULT_CHARS_MAX

    def _forget(self, number: int) -> Fault:
        fault = self._by_number.pop(number)
        del self._numbers[fault]
        self._chars -= _chars(fault)
        return fault

    def all(self) -> list[tuple[int, Fault]]:
        """Return every fault with its number."""
        return list(self._by_number.items())

    @classmethod
    def of(cls, numbered: Iterable[tuple[int, Fault]]) -> Faults:
        """Return the faults that `all` has returned."""
        faults = cls()
        for number, fault in numbered:
            faults._add(number, fault)
        return faults


def fault_of(failure: Failure) -> Fault:
    """Return the part of a failure that failures of several messages may have in common."""
    return Fault(failure.kind, failure.text, failure.client, failure.attempts)


def _chars(fault: Fault) -> int:
    return len(fault.kind) + len(fault.text) + len(fault.client)


def too_many_runs(runs: Iterable[FailureRuns]) -> bool:
    """Return True if a key has too many runs."""
    return sum(map(len, runs)) > FAILURE_RUNS_MAX
