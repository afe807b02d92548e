"""Holds messages that wait for retry, by the time at which they are due, and the sources whose
messages could not be read. Pure.

    add ─▶ by due time ─▶ take ─▶ read ─┬─ answered: held messages are due
              ▲                         ╰─ failed: unreadable messages, and those after them, are
              │                             due again separately, after a pause that grows with
              │                             each consecutive failure
              ╰──────── held ◀── due while a failed read of its source is not made up for

Invariants
    While the reads of a source fail, one take of it at a time asks its broker; its other due
    messages are held. Held messages ask in turn: a broker that lacks one message, or has it
    damaged, may have the others, even those next to it. Other sources are not held up.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from ...protocol.offsets import IntervalSet, Range


class _Waiting(NamedTuple):
    due_ns: int
    number: int
    key: int
    source: int
    start: int
    end: int


class DueTry(NamedTuple):
    """Due messages with one number of tries and from one source."""

    key: int
    source: int
    ranges: list[Range]
    asks: bool
    """True if it asks whether a source whose reads failed answers again."""


class _Failing:
    """A source whose last read failed."""

    __slots__ = ("asking", "failures", "held", "until_ns")

    def __init__(self) -> None:
        self.failures = 0
        self.until_ns = 0
        self.asking = False
        self.held: deque[_Waiting] = deque()


class DueTries:
    """The messages that wait for retry on one partition; every time is nanoseconds of the boot
    clock.
    """

    def __init__(self) -> None:
        self._waiting: list[_Waiting] = []
        self._number = 0
        self._failing: dict[int, _Failing] = {}
        """The failing sources, by id."""

    def __len__(self) -> int:
        """Return the number of ranges of offsets that wait."""
        return len(self._waiting) + sum(len(each.held) for each in self._failing.values())

    @property
    def next_ns(self) -> int | None:
        """Return the time to call `take`; None if nothing waits, or everything waits for a take
        that is under way.
        """
        return self._waiting[0].due_ns if self._waiting else None

    def add(self, key: int, source: int, part: Range, due_ns: int) -> None:
        """Let a range of offsets wait until `due_ns`, after `key` tries."""
        heapq.heappush(self._waiting, self._numbered(key, source, part, due_ns))

    def _numbered(self, key: int, source: int, part: Range, due_ns: int) -> _Waiting:
        self._number += 1
        return _Waiting(due_ns, self._number, key, source, *part)

    def take(self, count: int, now_ns: int) -> DueTry | None:
        """Take up to `count` messages that are due, or return None if there are none, or all are
        held.
        """
        waiting = self._waiting
        while waiting and waiting[0].due_ns <= now_ns:
            _, _, key, source, *_ = waiting[0]
            failing = self._failing.get(source)
            if failing is None or not (failing.asking or now_ns < failing.until_ns):
                return self._take(key, source, failing, count, now_ns)
            failing.held.append(heapq.heappop(waiting))
        return None

    def _take(
        self, key: int, source: int, failing: _Failing | None, count: int, now_ns: int
    ) -> DueTry:
        waiting = self._waiting
        if failing is not None:
            failing.asking = True
        taken: list[Range] = []
        while waiting and count > 0:
            first = waiting[0]
            if first.due_ns > now_ns or (first.key, first.source) != (key, source):
                break
            heapq.heappop(waiting)
            end = min(first.end, first.start + count)
            taken.append((first.start, end))
            count -= end - first.start
            if end < first.end:
                heapq.heappush(waiting, first._replace(start=end))
        return DueTry(key, source, list(IntervalSet(taken)), failing is not None)

    def answered(self, source: int) -> None:
        """Note that a read of this source was answered."""
        failing = self._failing.pop(source, None)
        for each in failing.held if failing is not None else ():
            heapq.heappush(self._waiting, each)

    def failed(
        self,
        taken: DueTry,
        now_ns: int,
        pause_ns: Callable[[int], int],
        *,
        upto: int | None = None,
    ) -> None:
        """
        Let the taken messages wait again, because the first of them could not be read.

        Args:
            pause_ns: the nanoseconds to wait, by the number of consecutive failures.
            upto: the end offset of the messages that are known to be unreadable; None: only the
                first is.
        """
        key, source, ranges, asks = taken
        failing = self._failing.get(source)
        began_before = failing is not None and not asks  # the first failure
        if failing is None:
            failing = self._failing[source] = _Failing()
        parts = _parted(ranges, upto)
        failing.held.extend(self._numbered(key, source, part, now_ns) for part in parts)
        if began_before:
            return
        failing.failures += 1
        failing.asking = False
        failing.until_ns = now_ns + pause_ns(failing.failures)
        asks_next = failing.held.popleft()
        heapq.heappush(self._waiting, asks_next._replace(due_ns=failing.until_ns))


def _parted(ranges: list[Range], upto: int | None) -> list[Range]:
    """Return the ranges, with the unreadable messages of the first one separated from those after
    them.
    """
    start, end = ranges[0]
    cut = max(start + 1, upto or 0)
    first = [(start, end)] if cut >= end else [(start, cut), (cut, end)]
    return [*first, *ranges[1:]]
