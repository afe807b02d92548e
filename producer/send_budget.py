"""How much is queued and not yet answered: room for more, and nothing left.  How much was given up untold."""

from __future__ import annotations

import asyncio

from ..protocol.errors import GivenUpError, KeylaneError
from ..protocol.message import Receipt
from .given_up import GivenUp, Untold
from .outgoing_batch import OutgoingBatch

UNAWAITED_MAX = 64
"""Tasks that may each have one message over the limit that they do not await."""


class SendBudget:
    """
    Bytes and messages of all closed batches of a producer, from `enter` until they are answered or leave.

    Over the limit a task may queue one message after another as long as it awaits each: then what is queued over the
    limit is not more than what tasks have in hand.  A task that does not await its last one is refused.
    """

    def __init__(self, bytes_max: int) -> None:
        self.bytes = 0
        self.messages = 0
        self.acked = 0
        self.failed = 0
        self._untold = Untold()
        self._bytes_max = bytes_max
        self._unawaited: set[object] = set()
        """Tasks that do not await what they queued over the limit; none while there is room."""
        self._room = asyncio.Event()
        self._empty = asyncio.Event()

    def enter(self, messages: int, size: int) -> None:
        """Messages joined the queue."""
        self.messages += messages
        self.bytes += size

    def leave(self, batch: OutgoingBatch) -> None:
        """A batch left the queue, because it is settled or because its messages went into others."""
        self.messages -= len(batch) - batch.expired
        self.bytes -= batch.size
        assert self.messages >= 0
        assert self.bytes >= 0
        if self.bytes < self._bytes_max:
            self._unawaited.clear()
        if self.bytes * 2 < self._bytes_max:
            self._room.set()
        if not self.messages:
            self._empty.set()

    def replaced(self, batch: OutgoingBatch, *rest: OutgoingBatch | None) -> None:
        """The messages of a batch went into others, which stay in the queue."""
        for one in rest:
            if one is not None:
                self.enter(len(one), one.size)
        self.leave(batch)

    def stored(self, batch: OutgoingBatch, receipt: Receipt) -> None:
        """The messages of a batch are stored one after another from `receipt.offset` on."""
        self.acked += batch.settle(receipt)
        self.leave(batch)

    def give_up(self, batch: OutgoingBatch, error: KeylaneError) -> None:
        """The messages of a batch are given up."""
        outcome = GivenUp(error, self._untold, doubtful=batch.doubtful)
        unknown = batch.unknown_count()
        count = batch.settle(outcome)
        outcome.count(count, unknown)
        self.failed += count
        self.leave(batch)

    def give_up_message(
        self, batch: OutgoingBatch, index: int, error: KeylaneError, *, doubtful: bool
    ) -> None:
        """One message of a batch is given up; the batch stays where it is."""
        outcome = GivenUp(error, self._untold, doubtful=doubtful)
        if not batch.settle_message(index, outcome):
            return
        outcome.count(1, doubtful or batch.may_be_stored(index))
        batch.expired += 1
        self.failed += 1
        self.messages -= 1
        if not self.messages:
            self._empty.set()

    def untold(self) -> GivenUpError | None:
        """What was given up since the last call and not told by a future; told from now on."""
        summary, self._untold = self._untold, Untold()
        return summary.error()

    # ── over the limit ───────────────────────────────────────────────────────────────────────────────
    def may_exceed(self, task: object) -> bool:
        """True if `task` may queue a message although the queue is full."""
        return task not in self._unawaited and len(self._unawaited) < UNAWAITED_MAX

    def exceeded(self, task: object) -> None:
        """A message of `task`, over the limit, is not awaited."""
        if self.bytes >= self._bytes_max:
            self._unawaited.add(task)

    def awaited(self, task: object) -> None:
        """The last message of `task` over the limit is awaited now."""
        self._unawaited.discard(task)

    # ── waiting ──────────────────────────────────────────────────────────────────────────────────────
    async def wait_for_room(self) -> None:
        """Wait while full, until half is free."""
        while self.bytes >= self._bytes_max:
            self._room.clear()
            await self._room.wait()

    async def wait_until_empty(self) -> None:
        """Wait until nothing is queued."""
        while self.messages:
            self._empty.clear()
            await self._empty.wait()
