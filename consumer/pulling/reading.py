"""Where the owner of a partition reads on, and what of it is left out.  Pure.

    begin at the cursor ─▶ unread(batch) ─▶ … ─▶ end of the partition
                                 │ retention by time was faster
                                 ╰─▶ pass_over ─▶ the first message that is still there

Invariants
    Offsets only rise; no message is read twice, none that was acked before, and none is left out unsaid.
"""

from __future__ import annotations

from ...protocol.message import Message
from ...protocol.offsets import AckedOffsets, Range
from ...protocol.record import Header


class Reading:
    """One partition, from what the broker says is acked on."""

    __slots__ = ("_acked", "missed", "next_offset")

    def __init__(self) -> None:
        self._acked = AckedOffsets()
        self.next_offset = -1
        """The first offset that is not pulled yet; -1 before `begin`."""
        self.missed = 0
        """Messages that were gone before they were pulled."""

    @property
    def begun(self) -> bool:
        """The cursor is known."""
        return self.next_offset >= 0

    def begin(self, cursor: int, ranges: tuple[Range, ...]) -> None:
        """Read from `cursor` on, and leave out `ranges`, acked above it."""
        self._acked = AckedOffsets(cursor, list(ranges))
        self.next_offset = cursor

    def unread(self, messages: list[Message], header: Header) -> list[Message]:
        """Those of a batch that are neither read nor acked; they are read now."""
        if header.base_offset < self.next_offset:
            messages = messages[self.next_offset - header.base_offset :]
        if self._acked.range_count or self._acked.cursor > self.next_offset:
            messages = [one for one in messages if one.offset not in self._acked]
        self.next_offset = header.next_offset
        return messages

    def pass_over(self, first_offset: int) -> int:
        """Read on at `first_offset`, what is before it being gone; how many messages of it were not acked."""
        missed = self._acked.unacked(self.next_offset, first_offset)
        self.next_offset = first_offset
        self.missed += missed
        return missed
