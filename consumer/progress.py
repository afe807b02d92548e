"""Tracks how far a partition is pulled and acked, and computes its lag. Pure.

record_pull(batch) ─▶ times of unacked batches ─▶ record_acks(cursor) drops those below
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from itertools import islice

from ..protocol.record import Header

TIMES_MAX = 1_000
"""The maximum number of times kept for unacked batches; beyond it, several batches share one."""


@dataclass(frozen=True, slots=True)
class Position:
    """The position of a consumer in a partition."""

    next_offset: int
    """The first offset that is not pulled yet; -1 until the broker has reported the group's
    cursor.
    """
    cursor: int
    """The group's cursor: everything below it is acked at the broker."""
    end_offset: int
    """The partition's end, as the broker reported it with the last pull."""
    lag_messages: int
    """The number of messages from the cursor to the end; some may be acked above the cursor."""
    lag_s: float
    """
    The age, in seconds, of the oldest pulled batch that is not acked, by the sender's wall clock;
    0.0 if there is no lag.

    If no such batch is pulled, for example after `pause`, this is the age of the batch that was
    pulled last.
    """


class PullProgress:
    """Tracks how far a partition is pulled and acked. Times are in nanoseconds since 1970."""

    __slots__ = ("_last_count", "_last_ns", "_batches_per_entry", "_unacked", "end_offset")

    def __init__(self) -> None:
        self.end_offset = 0
        self._unacked: deque[tuple[int, int]] = deque()
        """
        The (next offset, time of the first message) of unacked batches, usually one entry per
        batch.

        There may be many: one message may be in its handler for hours, while all later ones are
        pulled and handled.
        """
        self._batches_per_entry = 1
        """The number of batches per entry."""
        self._last_count = 0
        """The number of batches in the last entry."""
        self._last_ns = 0

    def record_pull(self, header: Header) -> None:
        """Record a pulled batch."""
        next_offset = header.base_offset + header.count
        unacked = self._unacked
        if unacked and self._last_count < self._batches_per_entry:
            unacked[-1] = next_offset, unacked[-1][1]
            self._last_count += 1
        else:
            unacked.append((next_offset, header.first_sent_at_ns))
            self._last_count = 1
            if len(unacked) > TIMES_MAX:
                self._merge_pairs()
        self._last_ns = header.last_sent_at_ns
        self.end_offset = max(self.end_offset, next_offset)

    def _merge_pairs(self) -> None:
        """Merge entries in pairs, keeping the older time; the last entry stays."""
        last = self._unacked.pop()
        pairs = zip(
            islice(self._unacked, 0, None, 2), islice(self._unacked, 1, None, 2), strict=True
        )
        self._unacked = deque([(later[0], earlier[1]) for earlier, later in pairs])
        self._unacked.append(last)
        self._batches_per_entry *= 2

    def record_end(self, end_offset: int) -> None:
        """Record the partition's end, as the broker reports it."""
        self.end_offset = max(self.end_offset, end_offset)

    def record_acks(self, cursor: int) -> None:
        """Drop the entries below `cursor`, which are acked."""
        while self._unacked and self._unacked[0][0] <= cursor:
            self._unacked.popleft()
            if len(self._unacked) < TIMES_MAX // 2 and self._batches_per_entry > 1:
                self._batches_per_entry //= 2
        self.end_offset = max(self.end_offset, cursor)

    def position(self, next_offset: int, cursor: int, now_ns: int) -> Position:
        """Return the position at `now_ns`."""
        end = max(self.end_offset, next_offset)
        lag = max(0, end - cursor)
        since_ns = self._unacked[0][1] if self._unacked else self._last_ns
        age_s = max(0, now_ns - since_ns) / 1e9 if lag and since_ns else 0.0
        return Position(next_offset, cursor, end, lag, age_s)
