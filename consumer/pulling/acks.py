"""The offsets of a partition that are handled and not yet acked at the broker. Pure.

    done ─▶ ranges, joined ─▶ the lowest of them under way ─▶ confirmed
                 ▲                          │ failed, or refused: with half as many
                 ╰──────────────────────────╯

Invariants
    A range leaves the queue only when the broker confirmed it: a failed request loses nothing.
    Every request carries the lowest handled offsets: gaps are filled before newer ranges are sent,
    and no message is acked before an older one that was handled as well. A broker keeps a limited
    number of ranges above a cursor. A range that begins at the cursor adds none, so the lowest
    range is always taken once all messages before it are handled: in whatever order handlers end,
    the cursor rises.
"""

from __future__ import annotations

from itertools import chain

from ...protocol.message import Message
from ...protocol.offsets import IntervalSet, Range

RANGES_PER_REQUEST = 1_000


class AckQueue:
    """Handled offsets as half-open ranges: those that are not sent yet, and those of the request
    under way.
    """

    __slots__ = (
        "end",
        "_ranges",
        "_ranges_max",
        "_start",
        "at_range_limit",
        "left_over",
        "under_way",
    )

    def __init__(self) -> None:
        self._ranges: list[Range] = []
        self._start = 0
        self.end = 0
        """The offset after the growing range of handled offsets; it is public for the hot path,
        because the next range begins there.
        """
        self._ranges_max = RANGES_PER_REQUEST
        """The most ranges in the next request: halved after a refusal, doubled after a
        confirmation.
        """
        self.under_way: list[Range] = []
        self.left_over = False
        """True if the request under way lacks some messages that were handled when it was made."""
        self.at_range_limit = False
        """True if the broker has refused ranges, and has not taken everything handled since."""

    def done(self, offset: int) -> None:
        """Note that the message at `offset` is handled."""
        if offset == self.end:
            self.end = offset + 1
            return
        if self._start < self.end:
            self._ranges.append((self._start, self.end))
        self._start = offset
        self.end = offset + 1

    def done_range(self, start: int, end: int) -> None:
        """Note that the messages `[start, end)` are handled."""
        if start != self.end:
            if self._start < self.end:
                self._ranges.append((self._start, self.end))
            self._start = start
        self.end = end

    def __contains__(self, offset: int) -> bool:
        """Return True if the message at `offset` is handled and the broker has not confirmed it."""
        if self._start <= offset < self.end:
            return True
        waiting = chain(self.under_way, self._ranges)
        return any(start <= offset < end for start, end in waiting)

    def __bool__(self) -> bool:
        return self._start < self.end or bool(self._ranges) or bool(self.under_way)

    def take(self) -> tuple[Range, ...]:
        """Return the lowest ranges, sorted and joined, to send next; they include the ranges of a
        failed request.
        """
        if self._start < self.end:
            self._ranges.append((self._start, self.end))
            self._start = self.end
            if len(self._ranges) == 1 and not self.under_way:  # the case of handlers that keep up
                self.under_way = self._ranges
                self._ranges = []
                self.left_over = False
                return tuple(self.under_way)
        joined = list(IntervalSet(self.under_way + self._ranges))
        self.under_way = joined[: self._ranges_max]
        self._ranges = joined[self._ranges_max :]
        self.left_over = bool(self._ranges)
        return tuple(self.under_way)

    def confirmed(self) -> None:
        """Note that the broker has made the ranges under way durable."""
        self.under_way = []
        if self._ranges_max < RANGES_PER_REQUEST:
            self._ranges_max = min(2 * self._ranges_max, RANGES_PER_REQUEST)
        if not self._ranges:
            self.at_range_limit = False

    def refused(self) -> bool:
        """Note that the broker's range limit is reached, and return True if a request with fewer
        ranges can help.
        """
        self.at_range_limit = True
        fewer = len(self.under_way) > 1
        self._ranges_max = max(1, len(self.under_way) // 2)
        return fewer


def ranges_of(messages: list[Message]) -> list[Range]:
    """Return the ranges of the messages' offsets, by offset; the list is halved until its end
    follows from its start.
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
