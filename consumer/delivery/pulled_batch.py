"""A batch as its broker stored it, pulled and not opened yet, and which of its messages are to be handed out.  Pure.

It is opened when it is known what the program wants: messages, or Arrow columns.
"""

from __future__ import annotations

from typing import Any, Protocol

from ...protocol.message import Message
from ...protocol.offsets import Range
from ...protocol.record import Header


class BatchOpener(Protocol):
    """The pull client of a batch."""

    partition_id: int

    def decode(self, record: memoryview, header: Header) -> list[Message[Any]]:
        """Every message of a batch."""
        ...


class PulledBatch:
    """
    A batch of a partition.

    Args:
        client: pulled it.
        record: header and body.
        ranges: half-open, sorted, inside of the batch: the offsets that were neither pulled before nor acked.
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
        """Take the messages below `end` out, as a batch of their own."""
        below = [(low, min(high, end)) for low, high in self.ranges if low < end]
        self.ranges = [(max(low, end), high) for low, high in self.ranges if high > end]
        part = PulledBatch(self.client, self.record, self.header, below)
        self.count -= part.count
        return part

    def messages(self) -> list[Message[Any]]:
        """The messages to be handed out, by offset."""
        messages = self.client.decode(self.record, self.header)
        if self.count == len(messages):
            return messages
        base = self.header.base_offset
        return [
            message for start, end in self.ranges for message in messages[start - base : end - base]
        ]
