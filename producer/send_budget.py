"""Counts and limits the messages and bytes of a producer that are not answered yet."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from ..protocol.errors import GivenUpError, KeylaneError
from ..protocol.message import Receipt
from .given_up import GivenUp, Unreported
from .outgoing_batch import OutgoingBatch

MEMORY_PER_MESSAGE = 160
"""Bytes that CPython needs for a message besides its key and value: the headers of both, two places
in lists, rounding, and the future, which the program may keep.
"""
UNAWAITED_MAX = 64
"""The largest number of tasks that may each have a message over the limit that they do not await.
"""


@dataclass(frozen=True, slots=True)
class ProducerStats:
    """Counts since the producer was opened; no count ever falls."""

    sent: int
    """The number of messages that `send` queued, whether acked, given up, or neither yet."""
    acked: int
    """The number of messages that are stored, with an answer that confirms it."""
    failed: int
    """The number of messages that were given up. A message that timed out in flight counts here and
    not as acked, even if its broker stores it later.
    """
    retries: int
    """The number of failed tries after which batches were sent again."""
    waiting: dict[str, str]
    """The reasons why messages wait, by the name of their partition, or of their subject if they
    have no partition now.
    """
    throttled_ms: int = 0
    """Milliseconds for which servers have delayed calls because of a quota; waits that overlap are
    added up.
    """


class SendBudget:
    """
    The messages of all closed batches of a producer, and the memory that they take, counted from
    `enter` until they are settled.

    A task that awaits each of its messages may queue more while the limit is exceeded: it never has
    more than one message over the limit. A task that does not await its last message over the
    limit may not.
    """

    def __init__(self, bytes_max: int, when_full: Callable[[], object] | None = None) -> None:
        """
        Args:
            when_full: called when `full` has changed.
        """
        self.bytes = 0
        self.full = False
        """True while the limit is reached."""
        self._when_full = when_full
        self.messages = 0
        self.acked = 0
        self.failed = 0
        self.retries = 0
        """The number of failed tries after which batches were sent again."""
        self._unreported = Unreported()
        self._bytes_max = bytes_max
        self._unawaited: set[object] = set()
        """The tasks that do not await their last message over the limit; empty while the limit is
        not reached.
        """
        self._room: asyncio.Event | None = None
        """The event that is set when half of the limit is free; None if no task waits for it."""
        self._empty: asyncio.Event | None = None
        """The event that is set when no message is left; None if no task waits for it."""

    def _note_full(self) -> None:
        """Note whether the limit is reached."""
        self.full = self.bytes >= self._bytes_max
        if not self.full:
            self._unawaited.clear()
        if self._when_full is not None:
            self._when_full()

    def enter(self, messages: int, size: int, *, expired: int = 0) -> None:
        """Count messages that were queued, of `size` bytes in their batch; `expired` of them are
        already given up.
        """
        self.messages += messages - expired
        self.bytes += size + messages * MEMORY_PER_MESSAGE
        if self.bytes >= self._bytes_max and not self.full:
            self._note_full()

    def leave(self, batch: OutgoingBatch) -> None:
        """Remove a batch from the counts: it is settled, or its messages are in other batches."""
        count = batch.count
        self.messages -= count - batch.expired
        self.bytes -= batch.full_size - batch.room + count * MEMORY_PER_MESSAGE
        assert self.messages >= 0
        assert self.bytes >= 0
        if self.full and self.bytes < self._bytes_max:
            self._note_full()
        if self._room is not None and self.bytes * 2 < self._bytes_max:
            self._room.set()
            self._room = None
        if self._empty is not None and not self.messages:
            self._empty.set()
            self._empty = None

    def replaced(self, batch: OutgoingBatch, *rest: OutgoingBatch | None) -> None:
        """Count other batches, which now have the messages of a batch, in its place."""
        for part in rest:
            if part is not None:
                self.enter(part.count, part.size, expired=part.expired)
        self.leave(batch)

    def stored(self, batch: OutgoingBatch, receipt: Receipt) -> None:
        """Settle a batch whose messages are stored one after another from `receipt.offset` on."""
        self.acked += batch.settle(receipt)
        self.leave(batch)

    def give_up(self, batch: OutgoingBatch, error: KeylaneError) -> None:
        """Settle a batch whose messages are given up for `error`."""
        outcome = GivenUp(error, self._unreported, doubtful=batch.doubtful)
        unknown = batch.unknown_count()
        count = batch.settle(outcome)
        outcome.count(count, unknown)
        self.failed += count
        self.leave(batch)

    def give_up_message(
        self, batch: OutgoingBatch, index: int, error: KeylaneError, *, doubtful: bool
    ) -> None:
        """Give up message `index` of a batch; the batch stays queued or in flight."""
        outcome = GivenUp(error, self._unreported, doubtful=doubtful)
        if not batch.settle_message(index, outcome):
            return
        outcome.count(1, doubtful or batch.may_be_stored(index))
        batch.expired += 1
        self.failed += 1
        self.messages -= 1
        if self._empty is not None and not self.messages:
            self._empty.set()
            self._empty = None

    def unreported(self) -> GivenUpError | None:
        """Return the error for messages given up since the last call whose futures were not
        awaited; None if there are none.
        """
        summary = self._unreported
        self._unreported = Unreported()
        return summary.error()

    # ── over the limit ────────────────────────────────────────────────────────────────────────────
    def may_exceed(self, task: object) -> bool:
        """Return True if `task` may queue a message over the limit."""
        return task not in self._unawaited and len(self._unawaited) < UNAWAITED_MAX

    def exceeded(self, task: object) -> None:
        """Note that `task` does not await its last message over the limit."""
        if self.full:
            self._unawaited.add(task)

    def awaited(self, task: object) -> None:
        """Note that `task` awaits its last message over the limit."""
        self._unawaited.discard(task)

    # ── waiting ───────────────────────────────────────────────────────────────────────────────────
    async def wait_for_room(self) -> None:
        """
        Wait until half of the limit is free, if a quarter or less is free now.

        A program that calls this regularly has room for the messages that it sends before the next
        call.
        """
        if self.bytes * 4 < self._bytes_max * 3:
            return
        while self.bytes * 2 >= self._bytes_max:
            if self._room is None:
                self._room = asyncio.Event()
            await self._room.wait()

    async def wait_until_empty(self) -> None:
        """Wait until no message is queued or in flight."""
        while self.messages:
            if self._empty is None:
                self._empty = asyncio.Event()
            await self._empty.wait()
