"""Tracks which offsets of a partition are pulled, and which are handled and not acked yet. Pure.

    PullOffsets     begin at the cursor ─▶ take: the offsets of a batch that are new ─▶ … ─▶ the end
    HandledOffsets  add ─▶ take: the lowest ranges are in flight ─▶ confirm, or retract

Invariants
    The next offset only rises, and passes no message that is neither pulled, acked nor removed.
    A handled offset leaves only when the broker has confirmed it. Each request has the lowest
    handled offsets, so the cursor rises in whatever order handlers end.
"""

from __future__ import annotations

from ...protocol.errors import OutcomeUnknownError
from ...protocol.message import Message
from ...protocol.offsets import AckedOffsets, IntervalSet, Range

RANGES_PER_ACK = 1_000


class PullOffsets:
    """The offsets that are pulled next, and those that the broker has acks of."""

    __slots__ = ("_acked_end", "acked", "cursor", "end_offset", "missed", "next_offset")

    def __init__(self) -> None:
        self.acked = AckedOffsets()
        """What is acked, as far as it decides what is handed out."""
        self._acked_end = 0
        self.next_offset = -1
        """The first offset that is not pulled; -1 before `begin`."""
        self.cursor = 0
        """The group's cursor, as the broker last reported it."""
        self.end_offset: int | None = None
        """The offset after the last message, once the partition is sealed."""
        self.missed = 0
        """The number of messages that retention removed before they were pulled."""

    @property
    def is_exhausted(self) -> bool:
        """True once the partition is sealed and pulled to its end."""
        return self.end_offset is not None and self.next_offset >= self.end_offset

    @property
    def is_acked_to_end(self) -> bool:
        """True once the partition is sealed, and the broker has acks of everything."""
        return self.end_offset is not None and self.cursor >= self.end_offset

    def begin(self, cursor: int, ranges: tuple[Range, ...]) -> None:
        """Begin at `cursor`; the `ranges` above it are acked."""
        self.begin_with(AckedOffsets(cursor, list(ranges)))
        self.next_offset = self.cursor = cursor

    def begin_with(self, acked: AckedOffsets) -> None:
        """Begin with the first offset that is not acked."""
        self.acked = acked
        self._acked_end = max((acked.cursor, *(end for _, end in acked.ranges)))
        self.next_offset = self.cursor = acked.cursor

    def take(self, start: int, end: int) -> list[Range]:
        """
        Return the offsets of `[start, end)` that were neither pulled nor acked, and pass `end`.

        Raises:
            OutcomeUnknownError: messages before `start` are missing.
        """
        if start == self.next_offset and start >= self._acked_end:  # the usual case
            self.next_offset = end
            return [(start, end)] if start < end else []
        if start > self.next_offset:
            raise OutcomeUnknownError.of_read(
                f"the broker has left out messages [{self.next_offset}, {start}) of an answer"
            )
        ranges: list[Range] = []
        low = self.acked.next_unacked(max(start, self.next_offset))
        while low < end:
            high = min(end, self.acked.next_acked(low))
            ranges.append((low, high))
            low = self.acked.next_unacked(high)
        self.next_offset = max(end, self.next_offset)
        return ranges

    def ack(self, start: int, end: int) -> None:
        """Ack `[start, end)` here, because no broker keeps a cursor."""
        self.acked.add(start, end)
        self.cursor = self.acked.cursor

    def mark_acked(self, offset: int) -> None:
        """Record that a message of a shared group was handled here: it is not begun again, even if
        the broker hands it out before it has the ack.
        """
        self.acked.add(offset, offset + 1)

    def is_acked(self, offset: int) -> bool:
        """Return True if a message is known to be handled."""
        return offset in self.acked

    def skip_removed(self, first_offset: int) -> int:
        """Continue at `first_offset`, because older messages are removed. Return how many of them
        were not acked.
        """
        missed = self.acked.count_unacked(self.next_offset, first_offset)
        self.next_offset = first_offset
        self.missed += missed
        return missed


class HandledOffsets:
    """The handled offsets that the broker has not confirmed."""

    __slots__ = ("_end", "_ranges", "_ranges_max", "_start", "in_flight", "is_refused")

    def __init__(self) -> None:
        self._ranges = IntervalSet()
        self._start = self._end = 0
        """The range that grows while handlers end in order."""
        self._ranges_max = RANGES_PER_ACK
        self.in_flight: tuple[Range, ...] = ()
        self.is_refused = False
        """True from a refusal of the broker, which keeps a limited number of ranges, until it has
        everything.
        """

    def __bool__(self) -> bool:
        """Return True if an offset is not in flight to the broker."""
        return self._start < self._end or bool(len(self._ranges))

    def __contains__(self, offset: int) -> bool:
        """Return True if the broker has not confirmed the offset, which is handled."""
        return (
            self._start <= offset < self._end
            or offset in self._ranges
            or any(start <= offset < end for start, end in self.in_flight)
        )

    def add(self, start: int, end: int) -> None:
        """Add `[start, end)`, which is handled."""
        if start != self._end:
            self._fold()
            self._start = start
        self._end = end

    def _fold(self) -> None:
        if self._start < self._end:
            self._ranges.add(self._start, self._end)
        self._start = self._end

    def take(self) -> tuple[Range, ...]:
        """Return the lowest ranges, which are then in flight."""
        self._fold()
        ranges = list(self._ranges)
        self.in_flight = tuple(ranges[: self._ranges_max])
        self._ranges = IntervalSet(ranges[self._ranges_max :])
        return self.in_flight

    def confirm(self) -> tuple[Range, ...]:
        """Drop and return the ranges in flight, which the broker has stored."""
        confirmed = self.in_flight
        self.in_flight = ()
        self._ranges_max = min(2 * self._ranges_max, RANGES_PER_ACK)
        if not self:
            self.is_refused = False
        return confirmed

    def retract(self, *, is_refused: bool = False) -> bool:
        """
        Take back the ranges in flight, because their request failed.

        Args:
            is_refused: the broker keeps no more ranges: the next request has half as many.

        Returns:
            True if a request with fewer ranges may succeed now.
        """
        self._fold()
        count = len(self.in_flight)
        for start, end in self.in_flight:
            self._ranges.add(start, end)
        self.in_flight = ()
        if is_refused:
            self.is_refused = True
            self._ranges_max = max(1, count // 2)
        return count > 1


def ranges_of(messages: list[Message]) -> list[Range]:
    """Return the ranges of the messages' offsets; they are sorted by offset. A part without a gap
    costs nothing by message.
    """
    ranges: list[Range] = []
    parts = [(0, len(messages))]
    while parts:
        low, high = parts.pop()
        if low == high:
            continue
        start, end = messages[low].offset, messages[high - 1].offset + 1
        if end - start != high - low:
            middle = (low + high) // 2
            parts += ((middle, high), (low, middle))
        elif ranges and ranges[-1][1] == start:
            ranges[-1] = ranges[-1][0], end
        else:
            ranges.append((start, end))
    return ranges
