"""Messages that wait for a retry at the broker, by the time at which they are due. Pure.

    put ─▶ by due time ─▶ take_due: a window ─┬─ read: what is held of its source is due
             ▲                                ╰─ not read: what could not be read, and separately
             ╰── held ◀── due while its source fails     what comes after it, are due after a pause

Invariant
    While reads of a source fail, one window at a time is read of it, and its messages take turns: a
    broker on which one message is missing or damaged may have the others. Other sources go on.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from ...protocol.offsets import IntervalSet, Range


class Aside(NamedTuple):
    """Messages that wait for a retry."""

    due_ms: int
    sequence: int
    tries: int
    source: int
    start: int
    end: int


class DueRetry(NamedTuple):
    """Messages of one source that are due, and have had the same number of tries."""

    tries: int
    source: int
    ranges: tuple[Range, ...]
    is_probe: bool
    """True if the last read of the source has failed."""


class FailingSource:
    """A source whose last read has failed."""

    __slots__ = ("failures", "held", "is_probed", "until_ms")

    def __init__(self) -> None:
        self.failures = 0
        self.held: deque[Aside] = deque()
        self.is_probed = False
        """True while a window of it is being read."""
        self.until_ms = 0


class AsideMessages:
    """The messages of one partition that wait for a retry."""

    __slots__ = ("_counts", "_sequence", "failing", "waiting")

    def __init__(self) -> None:
        self.waiting: list[Aside] = []
        """A heap."""
        self.failing: dict[int, FailingSource] = {}
        """The sources that cannot be read, which hold what else is due of them."""
        self._counts: dict[int, int] = {}
        """The number of ranges by source."""
        self._sequence = 0

    def __len__(self) -> int:
        """Return the number of ranges."""
        return sum(self._counts.values())

    def has_any_of(self, source: int) -> bool:
        """Return True if a message of the source waits."""
        return source in self._counts

    @property
    def next_ms(self) -> int | None:
        """When the next messages are due; None if none are, or all wait for a read."""
        return self.waiting[0].due_ms if self.waiting else None

    def put(self, due_ms: int, tries: int, source: int, offset_range: Range) -> None:
        """Add messages that wait until `due_ms`."""
        heapq.heappush(self.waiting, self._aside(due_ms, tries, source, offset_range))

    def _aside(self, due_ms: int, tries: int, source: int, offset_range: Range) -> Aside:
        self._sequence += 1
        self._counts[source] = self._counts.get(source, 0) + 1
        return Aside(due_ms, self._sequence, tries, source, *offset_range)

    def take_due(self, count: int, now_ms: int) -> DueRetry | None:
        """Remove and return up to `count` messages that are due; None if there are none."""
        waiting = self.waiting
        while waiting and waiting[0].due_ms <= now_ms:
            first = waiting[0]
            failing = self.failing.get(first.source)
            if failing is None:
                return self._take(first.tries, first.source, count, now_ms, is_probe=False)
            if not failing.is_probed and now_ms >= failing.until_ms:
                failing.is_probed = True
                return self._take(first.tries, first.source, count, now_ms, is_probe=True)
            failing.held.append(heapq.heappop(waiting))
        return None

    def _take(
        self, tries: int, source: int, count: int, now_ms: int, *, is_probe: bool
    ) -> DueRetry:
        waiting = self.waiting
        ranges: list[Range] = []
        while waiting and count:
            first = waiting[0]
            if first.due_ms > now_ms or (first.tries, first.source) != (tries, source):
                break
            heapq.heappop(waiting)
            end = min(first.end, first.start + count)
            ranges.append((first.start, end))
            count -= end - first.start
            if end < first.end:
                heapq.heappush(waiting, first._replace(start=end))
            elif self._counts[source] == 1:
                del self._counts[source]
            else:
                self._counts[source] -= 1
        return DueRetry(tries, source, tuple(IntervalSet(ranges)), is_probe)

    def note_read(self, source: int) -> None:
        """Note that a source was read: what is held of it is due again."""
        failing = self.failing.pop(source, None)
        for held in () if failing is None else failing.held:
            heapq.heappush(self.waiting, held)

    def put_back(
        self,
        due: DueRetry,
        now_ms: int,
        pause_ms: Callable[[int], int],
        *,
        upto: int | None = None,
    ) -> None:
        """
        Put back messages that could not be read, and back off from their source.

        Args:
            pause_ms: returns the pause after a number of failures in a row.
            upto: the offset after what cannot be read; None: only the first message is known to be
                unreadable.
        """
        failing = self.failing.get(due.source)
        began_before = failing is not None and not due.is_probe
        if failing is None:
            failing = self.failing[due.source] = FailingSource()
        for part in _split_unreadable(due.ranges, upto):
            failing.held.append(self._aside(now_ms, due.tries, due.source, part))
        if began_before:  # the read began before the first one that failed
            return
        failing.failures += 1
        failing.is_probed = False
        failing.until_ms = now_ms + pause_ms(failing.failures)
        next_probe = failing.held.popleft()
        heapq.heappush(self.waiting, next_probe._replace(due_ms=failing.until_ms))

    def clear(self) -> None:
        """Forget everything."""
        self.waiting.clear()
        self.failing.clear()
        self._counts.clear()


def _split_unreadable(ranges: tuple[Range, ...], upto: int | None) -> list[Range]:
    """Split the first range after what cannot be read of it."""
    start, end = ranges[0]
    cut = max(start + 1, upto or 0)
    first = [(start, end)] if cut >= end else [(start, cut), (cut, end)]
    return [*first, *ranges[1:]]
