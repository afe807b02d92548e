"""Tracks which offsets of a partition are pulled next or skipped, and whether it is drained. Pure.

    begin at the cursor ─▶ unseen(batch) ─▶ … ─▶ exhausted: nothing is left to pull
                                 │                   ─▶ drained: everything is acked
                                 │ retention removed messages before they were pulled
                                 ╰─▶ skip_removed ─▶ the first message that is still stored

Invariants
    `next_offset` only rises, and skips no message that is not acked or removed. No message is
    handed out twice, or after it was acked; removed messages are counted. Only a sealed partition
    can be drained.
"""

from __future__ import annotations

from ...protocol.errors import OutcomeUnknownError
from ...protocol.message import Message
from ...protocol.offsets import AckedOffsets, Range
from ...protocol.record import Header


class FetchOffsets:
    """Tracks the offsets of one partition under one grant."""

    __slots__ = ("_acked", "_acked_end", "cursor", "end_offset", "missed", "next_offset")

    def __init__(self) -> None:
        self._acked = AckedOffsets()
        self._acked_end = 0
        """One past the last acked offset."""
        self.next_offset = -1
        """The first offset that is not pulled yet; -1 before `begin`."""
        self.cursor = 0
        """The group's cursor, as last reported by the broker: everything below it is acked."""
        self.end_offset: int | None = None
        """One past the last offset, once the partition is sealed."""
        self.missed = 0
        """The number of messages that retention removed before they were pulled."""

    @property
    def begun(self) -> bool:
        """True once the broker has reported the cursor."""
        return self.next_offset >= 0

    @property
    def exhausted(self) -> bool:
        """True once the partition is sealed and fully pulled."""
        return self.end_offset is not None and self.next_offset >= self.end_offset

    @property
    def drained(self) -> bool:
        """True once the partition is sealed and its group has acked it to the end."""
        return self.end_offset is not None and self.cursor >= self.end_offset

    def begin(self, cursor: int, ranges: tuple[Range, ...]) -> None:
        """Start pulling at `cursor`, and skip the half-open `ranges` above it, which are already
        acked.
        """
        self._acked = AckedOffsets(cursor, list(ranges))
        self._acked_end = max((cursor, *(end for _, end in ranges)))
        self.next_offset = self.cursor = cursor

    def unseen(self, messages: list[Message], header: Header) -> list[Message]:
        """Return the messages of a batch that are in its `unseen_ranges`, and advance past the
        batch.
        """
        self._check_follows(header)
        if header.base_offset < self.next_offset:
            messages = messages[self.next_offset - header.base_offset :]
        if self._acked.range_count or self._acked.cursor > self.next_offset:
            messages = [message for message in messages if message.offset not in self._acked]
        self.next_offset = header.next_offset
        return messages

    def unseen_ranges(self, header: Header) -> list[Range]:
        """
        Return the offset ranges of a batch that were neither pulled nor acked, and advance past it.

        Raises:
            OutcomeUnknownError: the broker skipped messages before the batch.
        """
        start, end = header.base_offset, header.base_offset + header.count
        if start == self.next_offset and start >= self._acked_end:  # the usual case
            self.next_offset = end
            return [(start, end)]
        self._check_follows(header)
        return self.mark_skipped(start, end)

    def _check_follows(self, header: Header) -> None:
        if header.base_offset > self.next_offset:
            raise OutcomeUnknownError.of_read(
                f"the broker has left out messages [{self.next_offset}, "
                f"{header.base_offset}) of an answer"
            )

    def mark_skipped(self, start: int, end: int) -> list[Range]:
        """Return the ranges within `[start, end)` that were neither pulled nor acked, and advance
        to `end`.
        """
        ranges: list[Range] = []
        low = self._acked.next_unacked(max(start, self.next_offset))
        while low < end:
            high = min(end, self._acked.next_acked(low))
            ranges.append((low, high))
            low = self._acked.next_unacked(high)
        self.next_offset = max(end, self.next_offset)
        return ranges

    def mark_acked(self, start: int, end: int) -> None:
        """Mark `[start, end)`, which is not pulled yet, as acked, so that it is not handed out."""
        self._acked.add(start, end)
        self._acked_end = max(self._acked_end, end)

    def skip_removed(self, first_offset: int) -> int:
        """Continue at `first_offset`, because retention removed older messages. Return how many of
        those were not acked.
        """
        missed = self._acked.count_unacked(self.next_offset, first_offset)
        self.next_offset = first_offset
        self.missed += missed
        return missed
