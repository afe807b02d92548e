"""Which messages of a partition are handled and not yet acked at the broker.  Pure.

Invariants
    A range leaves the queue only when the broker confirmed it: a failed request loses nothing.
    Messages are taken in any order; the broker's cursor moves over what is contiguous and keeps the rest.
"""

from __future__ import annotations

from ..protocol.offsets import Range

RANGES_PER_REQUEST = 1_000


class AckQueue:
    """Handled offsets as half-open ranges: those not sent yet, and those of the one request under way."""

    __slots__ = ("_end", "_ranges", "_start", "under_way")

    def __init__(self) -> None:
        self._ranges: list[Range] = []
        self._start = 0
        self._end = 0
        self.under_way: list[Range] = []

    def done(self, offset: int) -> None:
        """The message at `offset` is handled."""
        if offset == self._end:
            self._end = offset + 1
            return
        if self._start < self._end:
            self._ranges.append((self._start, self._end))
        self._start = offset
        self._end = offset + 1

    def __bool__(self) -> bool:
        return self._start < self._end or bool(self._ranges) or bool(self.under_way)

    def take(self) -> tuple[Range, ...]:
        """The ranges to send next, sorted and joined; the same again until `confirmed`."""
        if not self.under_way:
            if self._start < self._end:
                self._ranges.append((self._start, self._end))
                self._start = self._end
            joined = _joined(self._ranges)
            self.under_way = joined[:RANGES_PER_REQUEST]
            self._ranges = joined[RANGES_PER_REQUEST:]
        return tuple(self.under_way)

    def confirmed(self) -> None:
        """The broker has made the ranges under way durable."""
        self.under_way = []


def _joined(ranges: list[Range]) -> list[Range]:
    joined: list[Range] = []
    for start, end in sorted(ranges):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((start, end))
    return joined
