"""Holds the messages of a subject that currently have no partition, in the order in which they will
be sent.

[batches that left a partition] [batches held again] [open batch: new messages]
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
    """Batches of messages without a partition, oldest first; new messages go to the last batch."""

    def __init__(
        self,
        subject: str,
        *,
        settings: ProducerSettings,
        clock: Clock,
        budget: SendBudget,
        broker_cause: Callable[[], WaitCause] = lambda: NO_PARTITION,
    ) -> None:
        """
        Args:
            broker_cause: returns the error cause of a broker that is in the route but refuses
                messages, or NO_PARTITION if there is none.
        """
        self._cause = NO_ROUTE
        self._broker_cause = broker_cause
        self._subject = subject
        self._settings = settings
        self._clock = clock
        self._budget = budget
        self._loop = asyncio.get_running_loop()
        self._report = WaitReport()
        self.batches: list[OutgoingBatch] = [OutgoingBatch(self._loop)]

    @property
    def cause(self) -> WaitCause:
        """The reason why messages are held."""
        return self._broker_cause() if self._cause is NO_PARTITION else self._cause

    def __len__(self) -> int:
        return sum(map(len, self.batches))

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
            batch = OutgoingBatch(self._loop)
            self.batches.append(batch)
        size = batch.size
        index = batch.add(key, value, packed_properties, sent_at_ns)
        self._budget.reserve(1, batch.size - size)
        return batch, index

    def prepend(self, batches: list[OutgoingBatch]) -> None:
        """Hold batches that left a partition ahead of all others."""
        self.batches = [*batches, *self.batches]

    def replace(self, batches: Iterable[OutgoingBatch]) -> None:
        """Replace all held batches with `batches`; new messages go to a new batch."""
        self.batches = [*batches, OutgoingBatch(self._loop)]

    def remove_sendable(
        self, queue_starts: QueueStarts, message_bytes_max: int
    ) -> list[OutgoingBatch]:
        """
        Remove and return all batches, after giving up the messages that the route does not allow.
        The route was unknown when they were queued. The batches stay in the budget.

        Args:
            queue_starts: the subject's logic queues.
            message_bytes_max: the subject's message size limit, in bytes.
        """
        batches = self.batches
        self.replace(())
        for batch in batches:
            for index, destination in (batch.destinations or {}).items():
                try:
                    queue_starts.logical_partition(destination)
                except KeylaneError as error:
                    self._budget.give_up_message(batch, index, error, doubtful=False)
            if message_bytes_max < MESSAGE_BYTES_MAX and batch.size > message_bytes_max:
                for index in range(len(batch)):
                    size = batch.size_of(index)
                    if size > message_bytes_max:
                        size_error = message_too_large(size, message_bytes_max)
                        self._budget.give_up_message(batch, index, size_error, doubtful=False)
        return batches

    def append_again(
        self, last_batch: OutgoingBatch | None, batch: OutgoingBatch, index: int
    ) -> OutgoingBatch:
        """Hold a message again that `remove_sendable` removed, behind those in the batch
        `last_batch`. Return its new batch.
        """
        if last_batch is None or self.is_full(last_batch, len(batch.values[index])):
            last_batch = OutgoingBatch(self._loop)
            self.batches.insert(len(self.batches) - 1, last_batch)
        size, expired_count = last_batch.size, last_batch.expired_count
        last_batch.adopt(batch, index)
        self._budget.reserve(
            1, last_batch.size - size, expired_count=last_batch.expired_count - expired_count
        )
        return last_batch

    def give_up(self, error: KeylaneError) -> None:
        """Give up all messages because of `error`."""
        while self.batches:
            if len(self.batches[0]):
                self._budget.give_up(self.batches[0], error)
            del self.batches[0]  # so that it is not given up twice if the next one raises
        self.replace(())

    def report(self, cause: WaitCause) -> None:
        """Log at growing intervals why messages are held, and log once none are held any more."""
        now_ms = self._clock.boot_ms()
        message_count = len(self)
        self._cause = cause if message_count else NO_PARTITION
        if not message_count:
            waited_ms = self._report.end(now_ms)
            if waited_ms is not None:
                log.warning("%s: sending resumed after %.0f s", self._subject, waited_ms / 1000)
            return
        oldest_ms = oldest_age_ms([batch for batch in self.batches if len(batch)], self._clock)
        if self._report.record_wait(now_ms, oldest_ms):
            log.warning(
                "%s: %s held back, the oldest for %.0f s: %s",
                self._subject,
                counted(message_count, "message is", "messages are"),
                oldest_ms / 1000,
                self.cause.reason,
            )
