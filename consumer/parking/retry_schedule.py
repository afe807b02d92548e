"""Schedules messages that wait for a retry by due time, with backoff for sources that cannot be
read. Pure.

    add ─▶ by due time ─▶ take ─▶ read ─┬─ on_success: held messages are due
              ▲                         ╰─ requeue_failed: unreadable messages, and separately
              │                             those after them, are due again after a backoff
              ╰──────── held ◀── due while the source fails

Invariants
    While reads of a source fail, one read at a time probes its broker, and its other due messages
    are held. Held messages take turns as probes: a broker on which one message is missing or
    damaged may have the others, even adjacent ones. Other sources are not delayed.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from ...protocol.offsets import IntervalSet, Range


class _Waiting(NamedTuple):
    """An offset range of one source that waits for its retry."""

    due_ns: int
    sequence: int
    key: int
    source: int
    start: int
    end: int


class DueTry(NamedTuple):
    """Due messages of one source with the same number of attempts."""

    key: int
    source: int
    ranges: list[Range]
    is_probe: bool
    """True for a probe of a source whose last read failed."""


class _FailingSource:
    """A source whose last read failed."""

    __slots__ = ("probing", "failures", "queued", "until_ns")

    def __init__(self) -> None:
        self.failures = 0
        self.until_ns = 0
        self.probing = False
        self.queued: deque[_Waiting] = deque()


class RetrySchedule:
    """Schedules the retries of one partition; times are in nanoseconds on the boot clock."""

    def __init__(self) -> None:
        self._waiting: list[_Waiting] = []
        self._sequence = 0
        self._failing: dict[int, _FailingSource] = {}
        """The failing sources, by id."""

    def __len__(self) -> int:
        """Return the number of waiting offset ranges."""
        return len(self._waiting) + sum(len(failing.queued) for failing in self._failing.values())

    @property
    def next_ns(self) -> int | None:
        """When to call `take` next; None if nothing is waiting, or everything is waiting for a read
        in progress.
        """
        return self._waiting[0].due_ns if self._waiting else None

    def add(self, key: int, source: int, offset_range: Range, due_ns: int) -> None:
        """Schedule an offset range, whose messages have had `key` attempts, for `due_ns`."""
        heapq.heappush(self._waiting, self._new_waiting(key, source, offset_range, due_ns))

    def _new_waiting(self, key: int, source: int, offset_range: Range, due_ns: int) -> _Waiting:
        self._sequence += 1
        return _Waiting(due_ns, self._sequence, key, source, *offset_range)

    def take(self, count: int, now_ns: int) -> DueTry | None:
        """Pop up to `count` due messages. Return None if there are none, or all are held."""
        waiting = self._waiting
        while waiting and waiting[0].due_ns <= now_ns:
            _, _, key, source, *_ = waiting[0]
            failing = self._failing.get(source)
            if failing is None or not (failing.probing or now_ns < failing.until_ns):
                return self._pop_due(key, source, failing, count, now_ns)
            failing.queued.append(heapq.heappop(waiting))
        return None

    def _pop_due(
        self, key: int, source: int, failing: _FailingSource | None, count: int, now_ns: int
    ) -> DueTry:
        waiting = self._waiting
        if failing is not None:
            failing.probing = True
        ranges: list[Range] = []
        while waiting and count > 0:
            first = waiting[0]
            if first.due_ns > now_ns or (first.key, first.source) != (key, source):
                break
            heapq.heappop(waiting)
            end = min(first.end, first.start + count)
            ranges.append((first.start, end))
            count -= end - first.start
            if end < first.end:
                heapq.heappush(waiting, first._replace(start=end))
        return DueTry(key, source, list(IntervalSet(ranges)), failing is not None)

    def on_success(self, source: int) -> None:
        """Release the held messages of a source after a successful read."""
        failing = self._failing.pop(source, None)
        for waiting in failing.queued if failing is not None else ():
            heapq.heappush(self._waiting, waiting)

    def requeue_failed(
        self,
        due_try: DueTry,
        now_ns: int,
        pause_ns: Callable[[int], int],
        *,
        upto: int | None = None,
    ) -> None:
        """
        Requeue messages after a failed read, and back off from their source.

        Args:
            due_try: the messages, of which the first one is unreadable.
            pause_ns: returns the backoff in nanoseconds for a number of consecutive failures.
            upto: the end offset of the unreadable messages; None: only the first one is known to be
                unreadable.
        """
        key, source, ranges, is_probe = due_try
        failing = self._failing.get(source)
        is_stale = failing is not None and not is_probe  # the read began before the first failure
        if failing is None:
            failing = self._failing[source] = _FailingSource()
        parts = _split_unreadable(ranges, upto)
        failing.queued.extend(
            self._new_waiting(key, source, offset_range, now_ns) for offset_range in parts
        )
        if is_stale:
            return
        failing.failures += 1
        failing.probing = False
        failing.until_ns = now_ns + pause_ns(failing.failures)
        next_probe = failing.queued.popleft()
        heapq.heappush(self._waiting, next_probe._replace(due_ns=failing.until_ns))


def _split_unreadable(ranges: list[Range], upto: int | None) -> list[Range]:
    """Split the first range after its unreadable messages."""
    start, end = ranges[0]
    cut = max(start + 1, upto or 0)
    first = [(start, end)] if cut >= end else [(start, cut), (cut, end)]
    return [*first, *ranges[1:]]
