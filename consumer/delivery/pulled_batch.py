"""A batch as its broker stored it, pulled but not yet opened, with the offsets of the messages to
be handed out. Pure.

It is opened when it is known whether the program wants messages or Arrow columns.
"""

from __future__ import annotations

from typing import Any, Protocol

from ...protocol.batch import Columns
from ...protocol.message import Message
from ...protocol.offsets import IntervalSet, Range
from ...protocol.record import Header


class BatchOpener(Protocol):
    """The pull client of a batch."""

    partition_id: int

    def decode(self, record: memoryview, header: Header) -> list[Message[Any]]:
        """Return every message of a batch."""
        ...


class PulledBatch:
    """
    A batch of a partition.

    Args:
        client: the pull client that pulled it.
        record: the header and the body.
        ranges: half-open, sorted and inside the batch: the offsets that were neither pulled before
            nor acked.
    """

    __slots__ = ("client", "count", "header", "ranges", "record")

    def __init__(
        self, client: BatchOpener, record: memoryview, header: Header, ranges: list[Range]
    ) -> None:
        self.client = client
        self.record = record
        self.header = header
        self.ranges = ranges
        self.count = sum(end - start for start, end in ranges)

    def cut(self, end: int) -> PulledBatch:
        """Take the messages below `end` out, as a separate batch."""
        below = [(low, min(high, end)) for low, high in self.ranges if low < end]
        self.ranges = [(max(low, end), high) for low, high in self.ranges if high > end]
        part = PulledBatch(self.client, self.record, self.header, below)
        self.count -= part.count
        return part

    def keep(self, messages: list[Message[Any]]) -> None:
        """Keep only `messages`, which are some of the batch's, by offset."""
        self.ranges = list(IntervalSet((each.offset, each.offset + 1) for each in messages))
        self.count = len(messages)

    def messages(self) -> list[Message[Any]]:
        """Return the messages to be handed out, by offset."""
        return self.wanted(self.client.decode(self.record, self.header))

    def wanted(self, messages: list[Message[Any]]) -> list[Message[Any]]:
        """Return those of all messages of the batch that are to be handed out."""
        return _inside(messages, self.header, self.ranges)


class CutOpener(Protocol):
    """The pull client of a cut batch."""

    def open_cut(self, batch: CutBatch) -> list[Message[Any]]:
        """Return the messages of a batch to be handled now."""
        ...


class CutBatch:
    """
    A batch for handlers, whose columns are checked and whose messages are made when they are next.

    Attributes:
        is_plain: whether all its messages are first tries, once it is opened.
    """

    __slots__ = ("client", "columns", "count", "header", "is_plain", "ranges")

    def __init__(
        self, client: CutOpener, columns: Columns[memoryview], header: Header, ranges: list[Range]
    ) -> None:
        self.client = client
        self.columns = columns
        self.header = header
        self.ranges = ranges
        self.count = 0
        for start, end in ranges:
            self.count += end - start
        self.is_plain = False

    def wanted(self, messages: list[Message[Any]]) -> list[Message[Any]]:
        """Return those of all messages of the batch that were neither pulled before nor acked."""
        return _inside(messages, self.header, self.ranges)

    def messages(self) -> list[Message[Any]]:
        """Return the messages to be handled, by offset."""
        return self.client.open_cut(self)


def _inside(
    messages: list[Message[Any]], header: Header, ranges: list[Range]
) -> list[Message[Any]]:
    """Return those of all messages of a batch whose offsets are inside the ranges."""
    base = header.base_offset
    if ranges == [(base, header.next_offset)]:
        return messages
    return [message for start, end in ranges for message in messages[start - base : end - base]]
