"""Counts and limits the unsettled messages and bytes of a producer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from ..protocol.errors import GivenUpError, KeylaneError
from ..protocol.message import Receipt
from ..rpc.operating.client_counts import ProducerCounts
from .given_up import GivenUpOutcome, UnreportedMessages
from .outgoing_batch import OutgoingBatch

MEMORY_PER_MESSAGE = 160
"""The memory, in bytes, that CPython needs for a message in addition to its key and value: two
object headers, two list entries, rounding, and the future, which the program may keep.
"""
UNAWAITED_MAX = 64
"""The maximum number of tasks that may each have one message over the limit without awaiting it."""


@dataclass(frozen=True, slots=True)
class ProducerStats:
    """Counts since the producer was opened; they never decrease."""

    sent: int
    """Messages queued by `send`, whatever their outcome."""
    acked: int
    """Messages that a broker has confirmed as stored."""
    failed: int
    """Messages that were given up. A message that timed out in flight counts as failed, not as
    acked, even if a broker stores it later.
    """
    retries: int
    """How often batches were sent again after a failed attempt."""
    waiting: dict[str, str]
    """Why messages are waiting, by the name of their partition; by subject for messages without a
    partition.
    """
    throttled_ms: int = 0
    """The total time, in milliseconds, by which servers have delayed calls because of a quota;
    overlapping waits are added up.
    """


class SendBudget:
    """
    Counts the messages in a producer's closed batches and their memory, from `reserve` until they
    are settled.

    A task that awaits each of its messages may continue to queue while the limit is exceeded,
    because it never has more than one message over the limit. A task that does not await its last
    message over the limit may not continue.
    """

    def __init__(self, bytes_max: int, on_full_changed: Callable[[], object] | None = None) -> None:
        """
        Args:
            bytes_max: the limit, in bytes of memory.
            on_full_changed: called when `full` has changed.
        """
        self.bytes = 0
        self.full = False
        """True while the limit is reached or exceeded."""
        self._on_full_changed = on_full_changed
        self.messages = 0
        self.counts = ProducerCounts(self)
        self._unreported = UnreportedMessages()
        self._bytes_max = bytes_max
        self._unawaited: set[object] = set()
        """The tasks that have not awaited their last message over the limit; empty unless the limit
        is reached.
        """
        self._capacity_event: asyncio.Event | None = None
        """Set when more than half of the limit is free; None if no task is waiting for that."""
        self._empty_event: asyncio.Event | None = None
        """Set when no message remains; None if no task is waiting for that."""

    def _update_full(self) -> None:
        """Update `full`, and notify the producer."""
        self.full = self.bytes >= self._bytes_max
        if not self.full:
            self._unawaited.clear()
        if self._on_full_changed is not None:
            self._on_full_changed()

    def reserve(self, messages: int, size: int, *, expired_count: int = 0) -> None:
        """Add queued messages, of `size` bytes in their batch; `expired_count` of them were already
        given up.
        """
        self.messages += messages - expired_count
        self.bytes += size + messages * MEMORY_PER_MESSAGE
        if self.bytes >= self._bytes_max and not self.full:
            self._update_full()

    def release(self, batch: OutgoingBatch) -> None:
        """Subtract a batch that is settled, or whose messages are in other batches now."""
        count = batch.count
        self.messages -= count - batch.expired_count
        self.bytes -= batch.full_size - batch.remaining_bytes + count * MEMORY_PER_MESSAGE
        assert self.messages >= 0
        assert self.bytes >= 0
        if self.full and self.bytes < self._bytes_max:
            self._update_full()
        if self._capacity_event is not None and self.bytes * 2 < self._bytes_max:
            self._capacity_event.set()
            self._capacity_event = None
        if self._empty_event is not None and not self.messages:
            self._empty_event.set()
            self._empty_event = None

    def replace(self, batch: OutgoingBatch, *parts: OutgoingBatch | None) -> None:
        """Count the batches in `parts`, which now contain the messages of `batch`, in its place."""
        for part in parts:
            if part is not None:
                self.reserve(part.count, part.size, expired_count=part.expired_count)
        self.release(batch)

    def settle_stored(self, batch: OutgoingBatch, receipt: Receipt) -> None:
        """Settle a batch whose messages are stored at consecutive offsets from `receipt.offset`."""
        self.counts.acked += batch.settle(receipt)
        self.release(batch)

    def give_up(self, batch: OutgoingBatch, error: KeylaneError) -> None:
        """Give up the messages of a batch because of `error`."""
        outcome = GivenUpOutcome(error, self._unreported, doubtful=batch.doubtful)
        unknown = batch.count_unknown()
        count = batch.settle(outcome)
        outcome.add_messages(count, unknown)
        self.counts.failed += count
        self.release(batch)

    def give_up_message(
        self, batch: OutgoingBatch, index: int, error: KeylaneError, *, doubtful: bool
    ) -> None:
        """Give up one message of a batch that itself stays queued or in flight."""
        outcome = GivenUpOutcome(error, self._unreported, doubtful=doubtful)
        if not batch.settle_message(index, outcome):
            return
        outcome.add_messages(1, doubtful or batch.may_be_stored(index))
        batch.expired_count += 1
        self.counts.failed += 1
        self.messages -= 1
        if self._empty_event is not None and not self.messages:
            self._empty_event.set()
            self._empty_event = None

    def take_unreported_error(self) -> GivenUpError | None:
        """Return the error for unawaited messages given up since the last call, or None."""
        summary = self._unreported
        self._unreported = UnreportedMessages()
        return summary.build_error()

    # ── over the limit ────────────────────────────────────────────────────────────────────────────
    def may_exceed(self, task: object) -> bool:
        """Return True if `task` may queue a message over the limit."""
        return task not in self._unawaited and len(self._unawaited) < UNAWAITED_MAX

    def record_unawaited(self, task: object) -> None:
        """Record that `task` has a message over the limit that it does not await."""
        if self.full:
            self._unawaited.add(task)

    def record_awaited(self, task: object) -> None:
        """Record that `task` awaits its message over the limit."""
        self._unawaited.discard(task)

    # ── waiting ───────────────────────────────────────────────────────────────────────────────────
    async def wait_for_capacity(self) -> None:
        """
        Return immediately if more than a quarter of the limit is free. Otherwise wait until more
        than half is free.
        """
        if self.bytes * 4 < self._bytes_max * 3:
            return
        while self.bytes * 2 >= self._bytes_max:
            if self._capacity_event is None:
                self._capacity_event = asyncio.Event()
            await self._capacity_event.wait()

    async def wait_until_empty(self) -> None:
        """Wait until no message is queued or in flight."""
        while self.messages:
            if self._empty_event is None:
                self._empty_event = asyncio.Event()
            await self._empty_event.wait()
