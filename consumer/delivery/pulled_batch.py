"""
Pulled batches that are not decoded yet, with the offsets to hand out. Pure.

Decoding waits until it is known whether the program takes messages or Arrow columns.
"""

from __future__ import annotations

from typing import Any, Protocol

from ...protocol.batch import Columns
from ...protocol.message import Message
from ...protocol.offsets import IntervalSet, Range
from ...protocol.record import Header


class BatchOpener(Protocol):
    """The part of a pull client that decodes its batches."""

    partition_id: int

    def decode(self, record: memoryview, header: Header) -> list[Message[Any]]:
        """Return all messages of a batch."""
        ...


class PulledBatch:
    """
    A batch in the form in which the broker stores it.

    Args:
        client: the pull client that pulled it.
        record: the header and the body.
        ranges: the offset ranges of the batch to hand out, half-open and sorted; their messages
            were neither pulled earlier nor acked.
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
        """Split off the messages below `end` and return them as a new batch."""
        below = [(low, min(high, end)) for low, high in self.ranges if low < end]
        self.ranges = [(max(low, end), high) for low, high in self.ranges if high > end]
        part = PulledBatch(self.client, self.record, self.header, below)
        self.count -= part.count
        return part

    def keep(self, messages: list[Message[Any]]) -> None:
        """Keep only `messages`, a subset of the batch in offset order."""
        self.ranges = list(
            IntervalSet((message.offset, message.offset + 1) for message in messages)
        )
        self.count = len(messages)

    def messages(self) -> list[Message[Any]]:
        """Return the messages to hand out, in offset order."""
        return self.select_wanted(self.client.decode(self.record, self.header))

    def select_wanted(self, messages: list[Message[Any]]) -> list[Message[Any]]:
        """Return those of `messages`, which are all messages of the batch, that are to be handed
        out.
        """
        return _in_ranges(messages, self.header, self.ranges)


class CutOpener(Protocol):
    """The part of a pull client that decodes its cut batches."""

    def decode_cut_batch(self, batch: CutBatch) -> list[Message[Any]]:
        """Return the messages of a batch that must be handled now."""
        ...


class CutBatch:
    """
    A batch for handlers: its columns are checked, and its messages are created when their turn
    comes.

    Attributes:
        has_only_first_attempts: True if, once opened, all its messages are first attempts.
    """

    __slots__ = ("client", "columns", "count", "header", "has_only_first_attempts", "ranges")

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
        self.has_only_first_attempts = False

    def select_wanted(self, messages: list[Message[Any]]) -> list[Message[Any]]:
        """Return those of `messages`, which are all messages of the batch, that must be handled."""
        return _in_ranges(messages, self.header, self.ranges)

    def messages(self) -> list[Message[Any]]:
        """Return the messages to handle, in offset order."""
        return self.client.decode_cut_batch(self)


def _in_ranges(
    messages: list[Message[Any]], header: Header, ranges: list[Range]
) -> list[Message[Any]]:
    """Return those messages of a batch whose offsets are within the ranges."""
    base = header.base_offset
    if ranges == [(base, header.next_offset)]:
        return messages
    return [message for start, end in ranges for message in messages[start - base : end - base]]
