"""Sends the recorded batches of one partition in order; later batches wait for a failed one."""

from __future__ import annotations

import asyncio
import logging
import random
from collections import deque
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Protocol

from ..protocol.errors import (
    Fate,
    KeylaneError,
    MessageTooLargeError,
    NotSentError,
    StaleRouteError,
)
from ..protocol.frames import Append
from ..protocol.limits import MESSAGE_BYTES_MAX
from ..protocol.routing import Partition
from ..rpc.client import BrokerClient
from ..rpc.network import Channel
from ..rpc.race import start_task
from ..rpc.tracing import current_tracing
from .assignment import Capacity
from .batches import OutboxBatch, SendSession, SendStep, decide_send_step
from .settings import OutboxSettings

log = logging.getLogger("keylane.outbox")
WARN_AT = 8
"""The number of consecutive failures, equivalent to a few seconds, after which a warning is
logged.
"""


class SenderOwner(Protocol):
    """The interface of the drainer to its senders."""

    def on_stored(self, batch: OutboxBatch) -> None:
        """Delete a stored batch in the next round."""
        ...

    def return_batches(
        self, subject: str, returned: list[OutboxBatch], failed: list[OutboxBatch], reason: str
    ) -> None:
        """Requeue the rows of the `returned` batches, and mark the rows of the `failed` ones as
        failed.
        """
        ...

    async def refresh_route(self, subject: str) -> object:
        """Fetch the latest route of a subject, and pass it to the subject's senders."""
        ...

    def on_task_done(self, task: asyncio.Task[None]) -> None:
        """If the task ended because of a bug, stop sending and raise the error in waiting
        callers.
        """
        ...


class PartitionSender:
    """Owns the batches of one partition, and the task that sends them."""

    def __init__(
        self,
        subject: str,
        partition_id: int,
        owner: SenderOwner,
        *,
        broker_at: Callable[[str], BrokerClient],
        settings: OutboxSettings,
        rng: random.Random,
        new_session: Callable[[], SendSession],
    ) -> None:
        self.subject = subject
        self.partition_id = partition_id
        self.partition: Partition | None = None
        """The partition and its broker's address; None until a route has listed it."""
        self.listed = False
        """True if the partition is open in the latest route."""
        self.sealed = False
        """True if the broker has refused a batch because the partition is sealed."""
        self.gone: KeylaneError | None = None
        """The reason why no broker can answer for the partition any more; None while one can."""
        self.limit_bytes = MESSAGE_BYTES_MAX
        """The size limit of a message, in bytes; a refusal by the broker may lower it."""
        self.problem = ""
        """The reason why batches are not being stored; empty while they are."""
        self.batches: deque[OutboxBatch] = deque()
        """Recorded batches that are not settled, oldest first; all belong to the same session."""
        self._owner = owner
        self._broker_at = broker_at
        self._settings = settings
        self._tracing = current_tracing()
        self._new_session = new_session
        self._session = new_session()
        self._next_sequence = 0
        self._pauses = settings.backoff.pauses(rng)
        self._wake = asyncio.Event()
        self._task = start_task(self._run(), name=f"outbox {subject} {partition_id}")
        self._task.add_done_callback(owner.on_task_done)

    @property
    def open(self) -> bool:
        """True while the partition can store new batches."""
        return self.listed and not self.sealed

    # ── recording ─────────────────────────────────────────────────────────────────────────────────
    def capacity(self) -> Capacity | None:
        """Return the capacity for new batches, or None if none may be recorded now."""
        batch_count = self._settings.in_flight_max - len(self.batches)
        # A broker recognizes only the latest batches, and batches that another process has recorded
        # must be stored before new ones.
        doubtful = any(batch.doubtful for batch in self.batches)
        if not self.open or doubtful or batch_count <= 0:
            return None
        return Capacity(self.partition_id, self._session, self._next_sequence, batch_count)

    def inherit(self, batches: Sequence[OutboxBatch]) -> None:
        """Send batches recorded by an earlier holder of the lease, before any new ones."""
        self.batches.extend(batches)
        self._wake.set()

    def enqueue(self, batch: OutboxBatch) -> bool:
        """Send a batch that was recorded for a `capacity`. Return False if that capacity is out of
        date.
        """
        if not self.open or batch.session != self._session:
            return False
        assert batch.sequence == self._next_sequence
        self._next_sequence += len(batch.rows)
        self.batches.append(batch)
        self._wake.set()
        return True

    # ── sending ───────────────────────────────────────────────────────────────────────────────────
    async def _run(self) -> None:
        while True:
            try:
                await self._send_batches()
            except KeylaneError as error:
                self.problem = error.message
                await self._owner.refresh_route(self.subject)
                if self._handle_failure(error):
                    self._pauses.skip()
                    continue
                wait_ms = self._pauses.next_pause_ms()
                level = logging.WARNING if self._pauses.failures == WARN_AT else logging.DEBUG
                log.log(level, "rows of %s wait: %s", self.subject, error.message)
                await asyncio.sleep(wait_ms / 1000)

    async def _open_channel(self) -> Channel:
        address = None if self.partition is None else self.partition.address
        if address is None:
            raise NotSentError(
                f"the metaserver knows no broker of partition {self.partition_id} that answers",
                partition_id=self.partition_id,
            )
        return await self._broker_at(address).channel()

    async def _send_batches(self) -> None:
        """Send until the first failure, then wait for all pending calls and raise the failure."""
        calls: deque[asyncio.Task[None]] = deque()
        try:
            while True:
                self._wake.clear()
                while calls and calls[0].done():
                    calls[0].result()
                    calls.popleft()
                    self._settle(self.batches[0])
                for batch in list(islice(self.batches, len(calls), None)):
                    channel = await self._open_channel()
                    call = start_task(self._append(channel, batch))
                    call.add_done_callback(lambda _: self._wake.set())
                    calls.append(call)
                await self._wake.wait()
        except asyncio.CancelledError:
            for call in calls:
                call.cancel()
            raise
        finally:
            called = list(self.batches)[: len(calls)]
            results = await asyncio.gather(*calls, return_exceptions=True)
            for batch, result in zip(called, results, strict=True):
                if result is None:
                    self._settle(batch)

    async def _append(self, channel: Channel, batch: OutboxBatch) -> None:
        end_trace = None
        if self._tracing is not None:
            packed = [row.properties for row in batch.rows]
            end_trace = self._tracing.begin_send_created(self.subject, self.partition_id, packed)
        failure: BaseException | None = None
        try:
            await channel.call(
                Append(self.partition_id),
                batch.encode(),
                timeout_ms=self._settings.call_timeout_ms,
            )
        except BaseException as error:
            failure = error
            if not isinstance(error, KeylaneError) or error.fate is Fate.UNKNOWN:
                batch.doubtful = True
            raise
        finally:
            if end_trace is not None:
                end_trace(failure)

    def _settle(self, batch: OutboxBatch) -> None:
        """Record that a batch is stored."""
        self._pauses.reset()
        self.problem = ""
        self.batches.remove(batch)
        self._owner.on_stored(batch)

    def _handle_failure(self, error: KeylaneError) -> bool:
        """Handle the error of the oldest batch. Return True if all batches were handed back."""
        if not self.batches:
            return False
        self.sealed = self.sealed or isinstance(error, StaleRouteError)
        if isinstance(error, MessageTooLargeError) and error.limit_bytes is not None:
            self.limit_bytes = error.limit_bytes
        step = decide_send_step(
            error,
            doubtful=self.batches[0].doubtful,
            closed=not self.open,
            gone=self.gone is not None,
        )
        if step is SendStep.RETRY:
            return False
        if step is SendStep.RETURN:
            returned_batches, failed_batches = list(self.batches), []
        else:
            returned_batches = [batch for batch in self.batches if not batch.doubtful]
            failed_batches = [batch for batch in self.batches if batch.doubtful]
        self.batches.clear()
        self._session = self._new_session()
        self._next_sequence = 0
        cause = self.gone or error
        self._owner.return_batches(self.subject, returned_batches, failed_batches, cause.message)
        return True

    async def close(self) -> None:
        """Stop sending."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
