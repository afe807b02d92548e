"""Queues the handled offsets of a partition until the broker has confirmed their acks. Pure.

    done ─▶ merged ranges ─▶ the lowest ones in flight ─▶ confirmed
                 ▲                    │ failed, or refused: retry with half as many
                 ╰────────────────────╯

Invariants
    A range leaves the queue only when the broker has confirmed it, so a failed request loses
    nothing. Every request contains the lowest handled offsets: gaps are filled before newer ranges
    are sent, and no message is acked before an older one that was handled too. A broker keeps a
    limited number of ranges above a cursor. A range that starts at the cursor does not add to that
    number, so the broker always accepts it: the cursor rises, no matter in which order handlers
    end.
"""

from __future__ import annotations

from itertools import chain

from ...protocol.message import Message
from ...protocol.offsets import IntervalSet, Range

RANGES_PER_REQUEST = 1_000


class AckQueue:
    """Holds handled offsets as half-open ranges: those not sent yet, and those in the request in
    flight.
    """

    __slots__ = (
        "end",
        "_ranges",
        "_ranges_max",
        "_start",
        "at_range_limit",
        "is_partial",
        "in_flight",
    )

    def __init__(self) -> None:
        self._ranges: list[Range] = []
        self._start = 0
        self.end = 0
        """The end of the range that is growing; public for the hot path, which extends it
        directly.
        """
        self._ranges_max = RANGES_PER_REQUEST
        """The range limit of the next request: halved after a refusal, doubled after a
        confirmation.
        """
        self.in_flight: list[Range] = []
        self.is_partial = False
        """True if the request in flight does not contain all messages handled when it was built."""
        self.at_range_limit = False
        """True from a refusal until the broker has acks for everything handled."""

    def mark_handled(self, offset: int) -> None:
        """Add the message at `offset`, which is handled."""
        if offset == self.end:
            self.end = offset + 1
            return
        if self._start < self.end:
            self._ranges.append((self._start, self.end))
        self._start = offset
        self.end = offset + 1

    def mark_range_handled(self, start: int, end: int) -> None:
        """Add the messages `[start, end)`, which are handled."""
        if start != self.end:
            if self._start < self.end:
                self._ranges.append((self._start, self.end))
            self._start = start
        self.end = end

    def __contains__(self, offset: int) -> bool:
        """Return True if the message at `offset` is handled but not confirmed."""
        if self._start <= offset < self.end:
            return True
        waiting = chain(self.in_flight, self._ranges)
        return any(start <= offset < end for start, end in waiting)

    def __bool__(self) -> bool:
        return self._start < self.end or bool(self._ranges) or bool(self.in_flight)

    def take(self) -> tuple[Range, ...]:
        """Return the lowest ranges for the next request, sorted and merged; they include those of a
        failed request.
        """
        if self._start < self.end:
            self._ranges.append((self._start, self.end))
            self._start = self.end
            if len(self._ranges) == 1 and not self.in_flight:  # the usual case: handlers keep up
                self.in_flight = self._ranges
                self._ranges = []
                self.is_partial = False
                return tuple(self.in_flight)
        merged = list(IntervalSet(self.in_flight + self._ranges))
        self.in_flight = merged[: self._ranges_max]
        self._ranges = merged[self._ranges_max :]
        self.is_partial = bool(self._ranges)
        return tuple(self.in_flight)

    def confirm(self) -> None:
        """Drop the ranges in flight, which the broker has stored durably."""
        self.in_flight = []
        if self._ranges_max < RANGES_PER_REQUEST:
            self._ranges_max = min(2 * self._ranges_max, RANGES_PER_REQUEST)
        if not self._ranges:
            self.at_range_limit = False

    def shrink_request(self) -> bool:
        """Halve the next request, because the broker has reached its range limit. Return True if a
        request with fewer ranges may succeed.
        """
        self.at_range_limit = True
        can_shrink = len(self.in_flight) > 1
        self._ranges_max = max(1, len(self.in_flight) // 2)
        return can_shrink


def ranges_of(messages: list[Message]) -> list[Range]:
    """Return the ranges of the messages' offsets. `messages` is sorted by offset, and is split in
    half until no part has gaps.
    """
    ranges: list[Range] = []
    parts = [(0, len(messages))]
    while parts:
        low, high = parts.pop()
        start, end = messages[low].offset, messages[high - 1].offset + 1
        if end - start != high - low:
            middle = (low + high) // 2
            parts.append((middle, high))
            parts.append((low, middle))
        elif ranges and ranges[-1][1] == start:
            ranges[-1] = ranges[-1][0], end
        else:
            ranges.append((start, end))
    return ranges
