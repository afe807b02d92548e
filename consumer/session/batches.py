"""Messages that a handler gets together, and that have one outcome. Pure.

    taken ─▶ in hand ─┬─ handled ─▶ their keys are free
                      ├─ failed ─▶ waits as a whole ─▶ fails again ─▶ two halves, by key ─▶ … ─▶ one
                      │                message, which is tried as a handler of one has it
                      ╰─ acked first, or each: waits for the ack

Invariants
    No two batches have messages of the same key: all keys of a batch are busy until it has ended.
    The messages of a batch are in the order of their offsets, and of one partition. Redriven ones
    are in batches of their own.
    While as many messages as fit into a batch wait for the keys of batches in hand, no other batch
    is begun. Those that wait for a failed batch do not count.
    A batch whose keys are all free costs nothing by message: its keys are not looked at until
    something else is taken, or it fails.
"""

from __future__ import annotations

import heapq
from collections import deque
from itertools import islice
from typing import NamedTuple

from ...protocol.message import Message
from .tenure import NEVER

WHOLE_TRIES = 2
"""After so many failures a batch is halved."""
PART_BITS = 4
"""A batch shrinks by so many bits if its first message failed that often under earlier owners, and
again after each further failure.
"""
Ref = tuple[int, int]


class MessageBatch:
    """
    At least one message.

    Args:
        keys: the distinct keys except b""; None: not looked at yet.
        attempt: the number of the batch's next try; messages may have had more.
    """

    __slots__ = ("attempt", "keys", "messages")

    def __init__(self, messages: list[Message], keys: set[bytes] | None, attempt: int = 1) -> None:
        self.messages = messages
        self.keys = keys
        self.attempt = attempt

    @property
    def ref(self) -> Ref:
        """What a batch is known by while it is in hand: its first message."""
        first = self.messages[0]
        return first.partition_id, first.offset

    def count_try(self, count: int = 1) -> None:
        """Count a try of each message."""
        self.attempt += count
        for message in self.messages:
            message.attempt += count

    def split(self) -> list[Message]:
        """
        Keep the first half, and return the other one, which may be empty.

        The messages of a key stay together, unless there is no other key: then the older half is
        kept.
        """
        keys = self.keys
        units = [(keys and message.key) or message.offset for message in self.messages]
        distinct = list(dict.fromkeys(units))
        if len(distinct) == 1:
            middle = (len(self.messages) + 1) // 2
            first_half, other_half = self.messages[:middle], self.messages[middle:]
        else:
            first = set(distinct[: (len(distinct) + 1) // 2])
            pairs = list(zip(self.messages, units, strict=True))
            first_half = [message for message, unit in pairs if unit in first]
            other_half = [message for message, unit in pairs if unit not in first]
        self.messages = first_half
        self.keys = keys and {message.key for message in first_half if message.key}
        return other_half


class WaitingBatch(NamedTuple):
    """A failed batch that waits for its next try; its keys are busy."""

    due_ms: int
    sequence: int
    batch: MessageBatch


class BatchFill:
    """
    How long messages wait until a batch is full.

    Args:
        wait_ms: 0: they do not wait.
    """

    __slots__ = ("_arrived", "_upto", "is_over", "until_ms", "wait_ms")

    def __init__(self, wait_ms: int) -> None:
        self.wait_ms = wait_ms
        self.is_over = not wait_ms
        """True if a batch may be smaller."""
        self.until_ms = NEVER
        """When the present wait ends."""
        self._arrived = 0
        self._upto = 0
        """How many messages had arrived when the wait began: it is for them."""

    def arrive(self, count: int, now_ms: int) -> None:
        """Record messages that have arrived; they wait for others."""
        self._arrived += count
        if self.wait_ms and self.until_ms == NEVER:
            self._begin(now_ms)

    def _begin(self, now_ms: int) -> None:
        self.until_ms = now_ms + self.wait_ms
        self._upto = self._arrived

    def expire(self, waiting: int, now_ms: int) -> None:
        """End the wait if its time is over; `waiting` messages are left."""
        if now_ms < self.until_ms:
            return
        self.until_ms = NEVER
        if waiting and self._arrived - waiting >= self._upto:  # later ones have their own wait
            self._begin(now_ms)
        elif waiting:
            self.is_over = True

    def empty(self) -> None:
        """Record that no message is left."""
        self.is_over = not self.wait_ms


class PartitionBatches:
    """
    The batches of one partition.

    Args:
        count_max: the largest number of messages in a batch.
        wait_ms: how long messages wait until a batch is full.
    """

    __slots__ = (
        "_sequence",
        "awaited",
        "count_max",
        "fill",
        "held",
        "in_hand",
        "is_unsorted",
        "running",
        "unregistered",
        "waiting",
    )

    def __init__(self, count_max: int, wait_ms: int) -> None:
        self.count_max = count_max
        self.fill = BatchFill(wait_ms)
        self.in_hand: dict[Ref, MessageBatch] = {}
        self.running: set[bytes] = set()
        """The keys of batches that have not failed, and have not ended."""
        self.held = 0
        """How many messages wait for these keys."""
        self.unregistered: MessageBatch | None = None
        """The batch in hand whose keys are not busy yet, because nothing else is in hand."""
        self.awaited: dict[Ref, MessageBatch] = {}
        """Batches that wait for their acks: handled ones (ack "each"), or one that was taken (ack
        "before").
        """
        self.waiting: list[WaitingBatch] = []
        """A heap of failed batches."""
        self.is_unsorted = False
        """True if opened messages are before older ones."""
        self._sequence = 0

    @property
    def count_in_hand(self) -> int:
        """The number of messages in hand."""
        return sum(len(batch.messages) for batch in self.in_hand.values())

    @property
    def count_awaited(self) -> int:
        """The number of messages that wait for their acks."""
        return sum(len(batch.messages) for batch in self.awaited.values())

    def wait(self, batch: MessageBatch, due_ms: int) -> None:
        """Keep a failed batch until `due_ms`."""
        self._sequence += 1
        heapq.heappush(self.waiting, WaitingBatch(due_ms, self._sequence, batch))

    def is_due(self, now_ms: int) -> bool:
        """Return True if a failed batch is to be tried now."""
        return bool(self.waiting) and self.waiting[0].due_ms <= now_ms

    def take_due(self, now_ms: int) -> MessageBatch | None:
        """Take a failed batch whose next try is due; None if there is none."""
        return heapq.heappop(self.waiting).batch if self.is_due(now_ms) else None

    def size_beginning_with(self, message: Message) -> int:
        """
        Return how many messages the next batch has at most, if it begins with this one.

        If its tries under earlier owners did not count, a batch that ends every process would never
        be halved.
        """
        extra = message.attempt - 1 - WHOLE_TRIES
        return self.count_max if extra < 0 else max(1, self.count_max >> (extra + 1) * PART_BITS)

    def discard(self, ref: Ref) -> int:
        """Remove a message from the failed batches that wait, and return how many it was."""
        count = 0
        for waiting in self.waiting:
            messages = waiting.batch.messages
            kept = [each for each in messages if (each.partition_id, each.offset) != ref]
            count += len(messages) - len(kept)
            waiting.batch.messages = kept
        if count:
            self.waiting = [waiting for waiting in self.waiting if waiting.batch.messages]
            heapq.heapify(self.waiting)
        return count

    def clear(self) -> None:
        """Drop everything that no worker has."""
        self.waiting.clear()
        self.held = 0


def take_first(messages: deque[Message], count: int) -> list[Message]:
    """Remove and return the first `count` messages."""
    if count >= len(messages):
        taken = list(messages)
        messages.clear()
        return taken
    taken = list(islice(messages, count))
    for _ in taken:
        messages.popleft()
    return taken
