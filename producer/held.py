"""Holds the messages of a subject that have no partition now, in the order in which they will be
sent.

[batches that left a partition] [batches held again] [open batch: messages sent meanwhile]
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable

from ..protocol.clock import Clock
from ..protocol.errors import KeylaneError
from ..protocol.limits import MESSAGE_BYTES_MAX
from ..protocol.message import message_too_large
from ..protocol.text import counted
from .outgoing_batch import OutgoingBatch
from .placing import QueueStarts
from .send_budget import SendBudget
from .settings import ProducerSettings
from .waiting import NO_PARTITION, NO_ROUTE, WaitCause, WaitReport, oldest_age_ms

log = logging.getLogger("keylane.producer")


class HeldMessages:
    """Batches of messages without a partition, the oldest first; the last batch takes new
    messages.
    """

    def __init__(
        self,
        subject: str,
        *,
        settings: ProducerSettings,
        clock: Clock,
        budget: SendBudget,
        said: Callable[[], WaitCause] = lambda: NO_PARTITION,
    ) -> None:
        """Args: said: returns the cause reported by a broker that the route names but that takes
        nothing; NO_PARTITION if there is no such broker.
        """
        self._cause = NO_ROUTE
        self._said = said
        self._subject = subject
        self._settings = settings
        self._clock = clock
        self._budget = budget
        self._loop = asyncio.get_running_loop()
        self._report = WaitReport()
        self.batches: list[OutgoingBatch] = [self._new_batch()]

    @property
    def cause(self) -> WaitCause:
        """Return why messages are held."""
        return self._said() if self._cause is NO_PARTITION else self._cause

    def __len__(self) -> int:
        return sum(map(len, self.batches))

    def _new_batch(self) -> OutgoingBatch:
        return OutgoingBatch(self._loop)

    def is_full(self, batch: OutgoingBatch, value_bytes: int) -> bool:
        """Return True if a message with a value of this size needs a new batch."""
        settings = self._settings
        return (
            batch.size >= settings.batch_bytes
            or len(batch) >= settings.batch_count
            or (len(batch) > 0 and value_bytes > settings.large_bytes)
        )

    def add(
        self, key: bytes, value: bytes, packed_properties: bytes, sent_at_ns: int
    ) -> tuple[OutgoingBatch, int]:
        """Append a new message, and return its batch and index."""
        batch = self.batches[-1]
        if self.is_full(batch, len(value)):
            batch = self._new_batch()
            self.batches.append(batch)
        size = batch.size
        index = batch.add(key, value, packed_properties, sent_at_ns)
        self._budget.enter(1, batch.size - size)
        return batch, index

    def put_first(self, batches: list[OutgoingBatch]) -> None:
        """Hold batches that left a partition, before all others."""
        self.batches = [*batches, *self.batches]

    def replace(self, batches: Iterable[OutgoingBatch]) -> None:
        """Hold these batches in place of all others; new messages begin a new batch."""
        self.batches = [*batches, self._new_batch()]

    def take_all(self) -> list[OutgoingBatch]:
        """Take all batches out; they stay counted in the budget."""
        batches = self.batches
        self.replace(())
        return batches

    def take_sendable(
        self, queue_starts: QueueStarts, message_bytes_max: int
    ) -> list[OutgoingBatch]:
        """
        Take all batches out, as `take_all` does, but give up the messages that cannot be sent by
        the route, which was unknown when they were queued.

        Args:
            queue_starts: the logic queues that the subject has.
            message_bytes_max: the largest message of the subject, in bytes.
        """
        batches = self.take_all()
        for batch in batches:
            for index, place in (batch.places or {}).items():
                try:
                    queue_starts.logical(place)
                except KeylaneError as error:
                    self._budget.give_up_message(batch, index, error, doubtful=False)
            if message_bytes_max < MESSAGE_BYTES_MAX and batch.size > message_bytes_max:
                for index in range(len(batch)):
                    size = batch.size_of(index)
                    if size > message_bytes_max:
                        large = message_too_large(size, message_bytes_max)
                        self._budget.give_up_message(batch, index, large, doubtful=False)
        return batches

    def keep(self, last: OutgoingBatch | None, batch: OutgoingBatch, index: int) -> OutgoingBatch:
        """Hold a message that was taken out again, after those in `last`, and return the batch that
        has it.
        """
        if last is None or self.is_full(last, len(batch.values[index])):
            last = self._new_batch()
            self.batches.insert(len(self.batches) - 1, last)
        size, expired = last.size, last.expired
        last.adopt(batch, index)
        self._budget.enter(1, last.size - size, expired=last.expired - expired)
        return last

    def give_up(self, error: KeylaneError) -> None:
        """Give up all messages for `error`."""
        while self.batches:
            if len(self.batches[0]):
                self._budget.give_up(self.batches[0], error)
            del self.batches[0]  # given up once, even if the next one fails
        self.replace(())

    def report(self, why: WaitCause) -> None:
        """Log at growing intervals why messages are held."""
        now_ms = self._clock.boot_ms()
        held = len(self)
        self._cause = why if held else NO_PARTITION
        if not held:
            took_ms = self._report.over(now_ms)
            if took_ms is not None:
                log.warning("%s: messages flow again after %.0f s", self._subject, took_ms / 1000)
            return
        oldest_ms = oldest_age_ms([batch for batch in self.batches if len(batch)], self._clock)
        if self._report.waits(now_ms, oldest_ms):
            log.warning(
                "%s: %s held back, the oldest for %.0f s: %s",
                self._subject,
                counted(held, "message is", "messages are"),
                oldest_ms / 1000,
                self.cause.reason,
            )
