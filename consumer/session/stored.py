"""Pulled batches, which are not opened, and the rows of them that a program takes as columns. Pure.

    stored, not opened ─▶ take_part: consecutive rows ─▶ in hand ─┬─ acked ─▶ the next part
                              ▲                                   ├─ given back: the same again
                              ╰───── cut: the rest goes back ◀────╯

Invariants
    While a part is in hand, or waits for its next try, no later row of the partition is handed out.
    Only a row that is alone in its part is accused of having ended a process: a larger part is
    handed out in up to PARTS smaller ones by the next owner.
"""

from __future__ import annotations

from collections import deque
from typing import Any, NamedTuple, Protocol

from ...protocol.message import Message
from ...protocol.offsets import Range

PART_BYTES_MAX = 2 << 20
"""The largest size of stored batches that are handed out together: they are copied, and larger
copies would need memory from the system.
"""
PARTS = 16
"""The number of smaller parts of a part that has ended its process. With 100,000 rows, the one that
does it is alone after at most five ends.
"""


class Unopened(Protocol):
    """A batch whose messages are not made yet."""

    start: int
    end: int
    """The offset after the last message."""
    size: int
    """How many bytes it has as it is stored."""

    def open(self) -> list[Message]:
        """Make and return all messages, in the order of their offsets."""
        ...


class ClosedBatch(NamedTuple):
    """A pulled batch, with the offsets that are to be handed out."""

    batch: Unopened
    ranges: list[Range]
    begin_until_ms: int
    """In a shared group, the time until which its messages may begin."""

    def open(self) -> list[Message]:
        """Return the messages to hand out."""
        messages, base, ranges = self.batch.open(), self.batch.start, self.ranges
        if ranges == [(base, self.batch.end)]:
            return messages
        return [message for start, end in ranges for message in messages[start - base : end - base]]


class ColumnPart:
    """Consecutive rows, of one stored batch or several.

    Attributes:
        crashes: how many processes have ended while this row was alone in hand; 0 if there are
            several rows.
        attempt: how often it was handed out.
        batches: what was pulled, until `built` is made of it.
        built: what the dispatch has made of it.
        range: the offsets of the rows, half-open.
    """

    __slots__ = ("attempt", "batches", "built", "crashes", "range")

    def __init__(self, batches: list[ClosedBatch], crashes: int = 0) -> None:
        self.batches = batches
        self.range: Range = batches[0].ranges[0][0], batches[-1].ranges[-1][1]
        self.crashes = crashes
        self.attempt = 0
        self.built: Any = None

    def keep_built(self, built: Any) -> None:
        """Keep what the dispatch has made of the part, in place of what was pulled."""
        self.built = built
        self.batches = []

    @property
    def offset(self) -> int:
        """The offset of the last row, under which the begin of the part is recorded."""
        return self.range[1] - 1

    @property
    def count(self) -> int:
        """The number of rows."""
        start, end = self.range
        return end - start


class PartitionColumns:
    """The part of one partition that is in hand, or comes next."""

    __slots__ = ("again", "awaited", "due_ms", "in_hand")

    def __init__(self) -> None:
        self.in_hand: ColumnPart | None = None
        self.awaited: ColumnPart | None = None
        """A part that is acked, while the next one waits for its ack to be durable."""
        self.again: ColumnPart | None = None
        """A part that comes before all others, from `due_ms` on."""
        self.due_ms = 0

    def begin(self, part: ColumnPart) -> None:
        """Give a part to the program."""
        self.again = None
        self.in_hand = part
        part.attempt += 1

    def wait(self, part: ColumnPart, due_ms: int) -> None:
        """Hand a part out before all others, from `due_ms` on."""
        self.in_hand = None
        self.again = part
        self.due_ms = due_ms

    def clear(self) -> None:
        """Drop what the program does not have."""
        self.again = self.awaited = None


def take_part(
    stored: deque[ClosedBatch], *, bytes_max: int = PART_BYTES_MAX, end: int | None = None
) -> ColumnPart:
    """Take the first rows of the stored batches: up to a gap in the offsets, to `end`, or to a
    batch with which they are larger than `bytes_max`.
    """
    batches: list[ClosedBatch] = []
    size, upto = 0, stored[0].ranges[0][0]
    while stored:
        batch = stored[0]
        start, stop = batch.ranges[0]
        size += batch.batch.size
        if start != upto or (batches and size > bytes_max) or (end is not None and start >= end):
            break
        upto = stop if end is None else min(stop, end)
        batches.append(batch._replace(ranges=[(start, upto)]))
        stored.popleft()
        rest = ([(upto, stop)] if upto < stop else []) + batch.ranges[1:]
        if rest:
            stored.appendleft(batch._replace(ranges=rest))
            break
    return ColumnPart(batches)


def cut_part(part: ColumnPart, end: int, stored: deque[ClosedBatch]) -> None:
    """Leave the rows below `end` in a part, and put the others back."""
    kept: list[ClosedBatch] = []
    rest: list[ClosedBatch] = []
    for batch in part.batches:
        ((start, stop),) = batch.ranges
        if start < end:
            kept.append(batch._replace(ranges=[(start, min(stop, end))]))
        if stop > end:
            rest.append(batch._replace(ranges=[(max(start, end), stop)]))
    part.batches = kept
    part.range = part.range[0], end
    stored.extendleft(reversed(rest))
