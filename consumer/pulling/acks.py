"""Which messages of a partition are handled and not yet acked at the broker.  Pure.

    done ─▶ ranges, joined ─▶ the lowest of them under way ─▶ confirmed
                 ▲                          │ failed, or refused: with half as many
                 ╰──────────────────────────╯

Invariants
    A range leaves the queue only when the broker confirmed it: a failed request loses nothing.
    Every request carries the lowest of what is handled: gaps are filled before new ranges above are told, and no
    message is acked before an older one that was handled as well.
    A broker keeps so many ranges above a cursor.  What begins at the cursor adds none, so the lowest range alone is
    always taken once all before it is handled: whatever the order in which handlers end, the cursor rises again.
"""

from __future__ import annotations

from ...protocol.offsets import IntervalSet, Range

RANGES_PER_REQUEST = 1_000


class AckQueue:
    """Handled offsets as half-open ranges: those not sent yet, and those of the one request under way."""

    __slots__ = ("_end", "_most", "_ranges", "_start", "crowded", "under_way")

    def __init__(self) -> None:
        self._ranges: list[Range] = []
        self._start = 0
        self._end = 0
        self._most = RANGES_PER_REQUEST
        """So many ranges go with the next request: less after a refusal, more again after each that was taken."""
        self.under_way: list[Range] = []
        self.crowded = False
        """The broker has refused a part of what is handled, and not taken all of it since."""

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
        """The ranges to send next, sorted and joined, with those of a request that failed; the lowest of them."""
        if self._start < self._end:
            self._ranges.append((self._start, self._end))
            self._start = self._end
        joined = list(IntervalSet(self.under_way + self._ranges))
        self.under_way = joined[: self._most]
        self._ranges = joined[self._most :]
        return tuple(self.under_way)

    def confirmed(self) -> None:
        """The broker has made the ranges under way durable."""
        self.under_way = []
        self._most = min(2 * self._most, RANGES_PER_REQUEST)
        if not self._ranges:
            self.crowded = False

    def refused(self) -> bool:
        """The broker keeps no more ranges than it has; True if fewer may still be taken at once."""
        self.crowded = True
        fewer = len(self.under_way) > 1
        self._most = max(1, len(self.under_way) // 2)
        return fewer
