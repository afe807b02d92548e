"""Sends the batches of a message group in order; no other executor sends to the group's partition.

    send() ─▶ open batch ─roll─▶ queue ─▶ in flight (a window, order kept by the sequence) ─▶
        settled

A message group is (client type, subject, partition, broker group), modelled on QMQ's send
executors. Each has an executor with its own queue, window and sequence, so an unresponsive
partition does not delay the others.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial

import msgspec

from ..protocol.clock import Clock
from ..protocol.errors import (
    DeliveryError,
    Fate,
    KeylaneError,
    MessageTooLargeError,
    NotSentError,
    OutcomeUnknownError,
    ProducerFencedError,
    Reason,
    SequenceGapError,
    SequenceReusedError,
    StaleRouteError,
)
from ..protocol.frames import Answer, Append, Appended
from ..protocol.log_filter import LogFilter
from ..protocol.record import Compression
from ..protocol.routing import Partition
from ..protocol.text import counted
from ..rpc.client import BrokerClient
from ..rpc.network import Calling, Channel, Gathering, is_answered
from ..rpc.race import start_task
from .executor_state import STEADY, ExecutorEvent, ExecutorState, MessageGroup, SendResult
from .failure import Step, decide_after_failure, decide_wait_stage
from .flight import BUSY_PARTITIONS_MAX, ExecutorOwner, SendScheduler
from .identity import Identity
from .outgoing_batch import OutgoingBatch, first_receipt
from .send_budget import SendBudget
from .settings import ProducerSettings
from .trying.loss import is_unrecoverable
from .trying.tries import retry_until_done, to_keylane_error
from .waiting import NOT_WAITING, PartitionWaits, WaitCause

log = logging.getLogger("keylane.producer")
SUCCESSOR_WAIT_MS = 500
"""How long an executor waits for a newer route before it asks the broker that refused it again, in
milliseconds.
"""


class Executor:
    """
    The queue and the sender task of one message group.

    Args:
        broker: None while the metaserver has no address for the broker group.
        epochs: the producer epochs, which increase across all executors of a subject. When a route
            returns to an earlier partition, its broker therefore cannot mistake a new batch for a
            repeat of one that the previous executor sent.
    """

    def __init__(
        self,
        group: MessageGroup,
        partition: Partition,
        broker: BrokerClient | None,
        owner: ExecutorOwner[Executor],
        *,
        may_reroute_keys: bool,
        static: bool,
        identity: Identity,
        settings: ProducerSettings,
        clock: Clock,
        rng: random.Random,
        budget: SendBudget,
        epochs: Iterator[int],
        send_scheduler: SendScheduler,
    ) -> None:
        self.group = group
        self.partition = partition
        self.state = ExecutorState(SendResult.FAILS) if broker is None else STEADY
        self._waits = PartitionWaits(group.partition_name, group.broker_group, clock)
        self._broker = broker
        self._owner = owner
        self._may_leave = may_reroute_keys
        self._static = static
        self._identity = identity
        self._producer_id = identity.producer_id
        self._settings = settings
        self._clock = clock
        self._budget = budget
        self._loop = asyncio.get_running_loop()
        self.open = OutgoingBatch(self._loop)
        self._queue: deque[OutgoingBatch] = deque()
        self._in_flight: deque[OutgoingBatch] = deque()
        self._calls: deque[tuple[OutgoingBatch, Calling]] = deque()
        """The pending calls with their batches, oldest first."""
        self._to_resend: deque[OutgoingBatch] = deque()
        """Batches in flight that must be sent again after a failure."""
        self._channel: Channel | None = None
        """The channel in use; None while the task is not streaming batches."""
        self._channel_broker: BrokerClient | None = None
        self.gathering: Gathering | None = None
        self._is_recovering = False
        """True from a failed call until no pending batch has failed or is doubtful; meanwhile, only
        the task sends.
        """
        self._send_scheduler = send_scheduler
        self._broker_load = send_scheduler.get_load(partition.address)
        self._counts_in_load = False
        """True while `_broker_load` counts this partition."""
        self.wait_is_over = False
        """True once the open batch no longer has to wait for replies to other partitions."""
        self._wake = asyncio.Event()
        self._epochs = epochs
        self._epoch = next(epochs)
        self._next_sequence = 0
        self._pauses = settings.backoff.pauses(rng)
        """The backoff between attempts, reset whenever a batch is stored."""
        self._failure_log = LogFilter()
        self._push_error: Exception | None = None
        """An exception from sending outside the task, kept until the task can raise it."""
        retries = retry_until_done(
            self._send_until_failure, self._handle_failure, self._pauses, self._to_keylane_error
        )
        self._task = start_task(retries, name=f"send {group.partition_name}")

    # ── filling ───────────────────────────────────────────────────────────────────────────────────
    def on_first_message(self) -> None:
        """Schedule sending, because the open batch has received its first message."""
        if self._settings.linger_ms:
            self.open.opened_at_ms = self._clock.boot_ms()
        if not self._calls:  # otherwise their replies trigger the send
            self.open.send_early = self._send_scheduler.schedule(self)

    def queue_open_batch(self) -> None:
        """Queue the open batch, if it has messages, and open a new one."""
        if self.open.values:
            self._queue.append(self._close_open_batch())
            self._send_scheduler.schedule(self)

    def _close_open_batch(self) -> OutgoingBatch:
        """Close the open batch and return it, and open a new one."""
        batch, next_batch = self.open, OutgoingBatch(self._loop)
        count = batch.count = len(batch.values)
        self._budget.reserve(
            count, batch.full_size - batch.remaining_bytes, expired_count=batch.expired_count
        )
        self.open = next_batch
        return batch

    def on_full(self) -> None:
        """Send the open batch, which is full, now, so that the broker can store it while the next
        batch fills.
        """
        self._queue.append(self._close_open_batch())
        self.push()

    def queue_batch(self, batch: OutgoingBatch) -> None:
        """Queue a closed batch of new messages."""
        self._budget.reserve(batch.count, batch.size)
        self.queue_batches([batch])

    def queue_batches(self, batches: list[OutgoingBatch]) -> None:
        """Queue batches that left another executor, behind those already queued."""
        self.queue_open_batch()
        self._queue.extend(batches)
        self._send_scheduler.schedule(self)

    def replace_unsent(self, transform: Callable[[OutgoingBatch], OutgoingBatch | None]) -> None:
        """
        Replace each batch that was never sent with the result of `transform`.

        Args:
            transform: returns the batch itself, a new batch with the remaining messages, or None if
                none remain. It must update the budget for each batch that it replaces.
        """
        if not self.batches:
            return
        self.queue_open_batch()
        replacements = {
            batch: batch if batch.send_count else transform(batch) for batch in self._in_flight
        }
        self._in_flight = deque(batch for batch in replacements.values() if batch is not None)
        self._to_resend = deque(
            batch for batch in map(replacements.get, self._to_resend) if batch is not None
        )
        self._queue = deque(batch for batch in map(transform, self._queue) if batch is not None)
        self._after_give_up()

    @property
    def batches(self) -> list[OutgoingBatch]:
        """All batches that are not settled, oldest first."""
        return [*self._in_flight, *self._queue, *([self.open] if self.open.values else [])]

    @property
    def idle(self) -> bool:
        """True while no message is open, queued or in flight."""
        return not (self._in_flight or self._queue or self.open.values)

    @property
    def cause(self) -> WaitCause:
        """The reason why messages have been waiting since the last failed attempt."""
        return self._waits.cause

    @property
    def wait_reason(self) -> str:
        """The reason why messages are waiting; empty if none are."""
        return self._waits.cause.reason if not self.idle or self.state.refuses else ""

    def apply_event(self, event: ExecutorEvent) -> None:
        """Update the state after news about the partition from a route, the history or a
        refusal.
        """
        self.state = self.state.apply(event)

    # ── sending ───────────────────────────────────────────────────────────────────────────────────
    async def _send_until_failure(self) -> bool:
        """Wait for messages, and send until a failure or until the channel can no longer be used.

        This always returns False, because the loop never ends on its own.
        """
        if self.state.available:
            while self.idle:
                self._wake.clear()
                await self._wake.wait()
        if self.state.refuses and self.idle:
            # An open channel does not mean that the broker accepts what it has refused: a newer
            # route has its successor.
            with suppress(TimeoutError):
                async with asyncio.timeout(SUCCESSOR_WAIT_MS / 1000):
                    await self._wake.wait()
        if self._broker is None:
            text = "the metaserver knows no broker of this group that answers"
            raise NotSentError(text, broker_group=self.group.broker_group)
        channel = await self._broker.channel()
        if self.idle:
            # With nothing to send, an open channel is the only sign that the broker is back.
            self._record_result(ExecutorEvent.ANSWERED)
            self._log_recovery()
        else:
            await self._send_batches(channel)
        return False

    def _to_keylane_error(self, raised: Exception) -> KeylaneError:
        """Convert the exception of a failed attempt. An unexpected one is logged and becomes an
        InternalError.
        """
        name = self.group.partition_name
        return to_keylane_error(raised, name, self._failure_log, self._clock.boot_ms())

    def _log_recovery(self) -> None:
        if failures := self._failure_log.end_failures(self._clock.boot_ms()):
            log.info("%s: sending works again, after %s", self.group.partition_name, failures)

    async def _handle_failure(self, raised: Exception) -> bool:
        """Handle the exception of a failed attempt. Return True to retry without a pause."""
        error = self._to_keylane_error(raised)
        self._record_result(ExecutorEvent.FAILED)
        doubtful = bool(self._in_flight) and self._in_flight[0].doubtful
        unrecoverable = doubtful and await is_unrecoverable(self, error, self._owner.fetch_history)
        if self._react_to_failure(error, unrecoverable=unrecoverable):
            return True
        self._budget.counts.retries += 1
        log.debug("%s: %s; retrying", self.group.partition_name, error.message)
        return False

    def _record_result(self, event: ExecutorEvent) -> None:
        """Update the state after an attempt, ANSWERED or FAILED, and notify the owner of a
        change.
        """
        state = self.state.apply(event)
        if state != self.state:
            self.state = state
            self._owner.on_availability_changed()

    def push(self) -> None:
        """Send the batches that may be sent now. Wake the task if it must wait for a timer, a
        channel or the recovery from a failure.
        """
        channel = self._channel
        if (
            channel is not None
            and not (self._is_recovering or self._to_resend or channel.closed)
            and (self._calls or self._broker is self._channel_broker)
        ):
            try:
                self._fill_window(channel)
                if not self._settings.linger_ms or self._calls or not self.open.values:
                    return
            except Exception as fault:  # noqa: BLE001 - raised by the task
                self._push_error = fault
        self._wake.set()

    async def _send_batches(self, channel: Channel) -> None:
        """Send until the channel can no longer be used. After a failure, wait for all pending calls
        and then raise it.
        """
        calls = self._calls
        self._channel = channel
        self._channel_broker = self._broker
        self.gathering = channel if isinstance(channel, Gathering) else None
        self._to_resend = deque(self._in_flight)
        self._is_recovering = any(batch.doubtful for batch in self._in_flight)
        try:
            while True:
                self._wake.clear()
                if self._push_error is not None:
                    fault = self._push_error
                    self._push_error = None
                    raise fault
                self._settle_stored()
                if calls and calls[0][1].cancelled():
                    text = f"no answer before the partition moved to {self.partition.address}"
                    raise OutcomeUnknownError(text)
                if calls and calls[0][1].done():
                    calls[0][1].result()  # raises the failure
                if not calls and (channel.closed or self._broker is not self._channel_broker):
                    return
                self._fill_window(channel)
                await self._pause(idle=not calls)
        except asyncio.CancelledError:  # the executor is closed
            for _, call in calls:
                call.cancel()
            raise
        finally:
            self._channel = None
            self._to_resend.clear()
            if calls:
                pending, can_settle = list(calls), True
                calls.clear()
                try:
                    await asyncio.gather(*(call for _, call in pending), return_exceptions=True)
                finally:
                    for batch, call in pending:
                        # A batch that got its reply after one that failed is sent again with it,
                        # perhaps under a new epoch.
                        batch.doubtful |= is_answered(call) or call.cancelled()
                    for batch, call in pending:
                        can_settle = is_answered(call) and (
                            can_settle or self._task.cancelling() > 0
                        )
                        if can_settle:
                            self._settle(batch, call.result()[0])
            if not calls:
                self._leave_broker_load()

    async def _pause(self, *, idle: bool) -> None:
        """Wait until the task is woken, or until the open batch has lingered for `linger_ms`."""
        if not idle or not self.open.values or not self._settings.linger_ms:
            await self._wake.wait()
            return
        waited_ms = self._clock.boot_ms() - self.open.opened_at_ms
        with suppress(TimeoutError):
            async with asyncio.timeout(max(0, self._settings.linger_ms - waited_ms) / 1000):
                await self._wake.wait()

    def _fill_window(self, channel: Channel) -> None:
        """Send batches until the window is full or no further batch may be sent."""
        calls, to_resend = self._calls, self._to_resend
        while not calls or len(calls) < self._settings.in_flight_max:
            if to_resend:
                batch: OutgoingBatch | None = to_resend.popleft()
            elif self._is_recovering and self._update_recovering():
                # A broker recognizes only the latest batches, so newer ones must not overtake a
                # doubtful batch.
                break
            else:
                batch = self._dequeue(idle=not calls)
            if batch is None:
                break
            try:
                calls.append((batch, self._send_batch(channel, batch)))
            except Exception:
                to_resend.appendleft(batch)  # it must be sent before any other batch
                raise
            if not (to_resend or self._is_recovering or self._queue):
                break  # the open batch waits for a reply
        if calls and not self._counts_in_load:
            self._counts_in_load = True
            self._broker_load.busy_partitions += 1

    def _leave_broker_load(self) -> None:
        """Stop counting this partition as busy, so that waiting partitions may send."""
        if self._counts_in_load:
            self._counts_in_load = False
            self._broker_load.release_partition()

    def _update_recovering(self) -> bool:
        """Recompute and return whether the executor is recovering from a failed call."""
        self._is_recovering = any(
            batch.doubtful or (call.done() and not is_answered(call)) for batch, call in self._calls
        )
        return self._is_recovering

    def _dequeue(self, *, idle: bool) -> OutgoingBatch | None:
        """Put the next queued batch in flight and return it. If `idle` is set, this may be the open
        batch, unless it waits for its linger or for other partitions.
        """
        if self._queue:
            batch = self._queue.popleft()
        else:
            if not idle or not self.open.values:
                return None
            if (
                self._settings.linger_ms or self._broker_load.busy_partitions >= BUSY_PARTITIONS_MAX
            ) and self._is_held_back():
                return None
            self.wait_is_over = False
            batch = self._close_open_batch()
        self._in_flight.append(batch)
        return batch

    def _is_held_back(self) -> bool:
        """Return True while the open batch waits for its linger or for replies to other
        partitions.
        """
        if self._settings.linger_ms:
            return self._clock.boot_ms() - self.open.opened_at_ms < self._settings.linger_ms
        load = self._broker_load
        if (
            self.wait_is_over
            or not load.is_crowded
            or 4 * self.open.size >= self._settings.batch_bytes
        ):
            return False
        load.enqueue(self)
        return True

    def _send_batch(self, channel: Channel, batch: OutgoingBatch) -> Calling:
        is_new = batch.data is None
        data = batch.pack(
            partition_id=self.partition.partition_id,
            producer_id=self._producer_id,
            producer_epoch=self._epoch,
            sequence=self._next_sequence,
            compression=Compression[self._settings.compression.upper()],
        )
        if is_new:
            self._next_sequence += batch.count
        batch.send_count += 1
        on_answer = partial(self._on_answer, batch)
        try:
            return channel.begin(
                Append(self.partition.partition_id),
                data,
                timeout_ms=self._settings.call_timeout_ms,
                on_answer=on_answer,
            )
        except Exception:
            batch.doubtful = True  # part of it may have been sent
            raise

    def _on_answer(self, batch: OutgoingBatch, call: Calling) -> None:
        """As soon as a reply arrives, settle the stored batches and send those that waited for
        them.
        """
        error = call.exception()
        if error is not None:
            self._is_recovering = True
            if not isinstance(error, KeylaneError) or error.fate is Fate.UNKNOWN:
                batch.doubtful = True
            self._wake.set()
            return
        try:
            self._settle_stored()
            if self._channel is not None:
                if not self._calls:
                    self._leave_broker_load()
                if self._is_recovering or self._in_flight or self._queue or self.open.values:
                    self.push()
        except Exception as fault:  # noqa: BLE001 - raised by the task
            self._push_error = fault
            self._wake.set()

    def _settle_stored(self) -> None:
        """Settle the oldest batches, up to the first one without a reply."""
        calls = self._calls
        while calls and is_answered(calls[0][1]):
            batch, call = calls[0]
            self._settle(batch, call.result()[0])
            calls.popleft()

    def _settle(self, batch: OutgoingBatch, answer: Answer) -> None:
        assert type(answer) is Appended
        if self.state is not STEADY and not self.state.available:
            self._record_result(ExecutorEvent.ANSWERED)
        if self._pauses.failures:
            self._pauses.reset()
            self._log_recovery()
        if batch in self._in_flight:  # otherwise it was settled before a later error
            waited_ns = self._clock.wall_ns() - batch.first_sent_at_ns
            self._budget.counts.latency.observe(waited_ns)
            self._budget.settle_stored(
                batch, first_receipt(answer, self.partition, static=self._static)
            )
            self._in_flight.remove(batch)
        if self._waits.cause is not NOT_WAITING:
            self._waits.end()
        if self.state is not STEADY:
            self._notify_if_empty()

    def _after_give_up(self) -> None:
        """After messages were given up, update the waits and notify the owner."""
        if self.idle:
            self._waits.end()
        self._notify_if_empty()

    def _notify_if_empty(self) -> None:
        if self.state.closed and self.idle:
            self._owner.on_emptied(self)

    # ── after a failure ───────────────────────────────────────────────────────────────────────────
    def _react_to_failure(self, error: KeylaneError, *, unrecoverable: bool) -> bool:
        """Handle the failure of the oldest batch. Return True to retry without a pause."""
        if not self._in_flight and self._dequeue(idle=True) is None:
            return False
        if self.state.lost:
            self._leave_lost_partition()
            return True
        if isinstance(error, MessageTooLargeError) and self._give_up_large_messages(error):
            return True
        step = self._decide_step(error, unrecoverable=unrecoverable)
        has_new_id = isinstance(error, SequenceReusedError | ProducerFencedError)
        if has_new_id:
            self._producer_id = self._identity.renew(self._producer_id, self.group.partition_name)
        if step is Step.RETRY:
            # A gap before the oldest batch means that the broker has forgotten this producer; no
            # older batch is missing.
            is_forgotten = isinstance(error, SequenceGapError) and self._in_flight[0].send_count > 1
            if is_forgotten or has_new_id:
                for batch in self._in_flight:
                    # Under a new id or epoch the broker cannot recognize a batch that it may have
                    # stored.
                    batch.reset(refused=False)
                self._begin_epoch()
            return False
        if step is Step.GIVE_UP:
            self._give_up_oldest_batch(error)
            return True
        self._leave_partition(error, step)
        return step is Step.REROUTE

    def _decide_step(self, error: KeylaneError, *, unrecoverable: bool) -> Step:
        """Count a failure for every closed batch, and decide the next step."""
        now_ms = self._clock.boot_ms()
        self._waits.begin(error, now_ms, self.batches, self.partition.address)
        for batch in (*self._in_flight, *self._queue):
            batch.record_failure(now_ms)
        oldest = self._in_flight[0]
        since_ms = self._waits.since_ms
        assert since_ms is not None
        assert oldest.failed_at_ms is not None
        stage = decide_wait_stage(
            self._settings,
            may_reroute_keys=self._may_leave,
            tries=oldest.tries,
            waited_ms=now_ms - oldest.failed_at_ms,
            failing_ms=now_ms - since_ms,
        )
        step = decide_after_failure(
            error,
            stage,
            closed=self.state.closed,
            unrecoverable=unrecoverable,
            doubtful=oldest.doubtful,  # later batches are stored only if this one is
        )
        if step is Step.REROUTE and not self._owner.has_alternative(self):
            return Step.RETRY
        return step

    def _leave_partition(self, error: KeylaneError, step: Step) -> None:
        """Hand all batches to the owner, which sends them to another partition or holds them until
        a newer route arrives.
        """
        sealed = isinstance(error, StaleRouteError)
        if sealed:
            self.apply_event(ExecutorEvent.SEALED)
        if step is Step.NEW_ROUTE:
            self.apply_event(ExecutorEvent.ROUTE_NEEDED)
        # A sealed partition has not stored the batch it refused, even if an earlier attempt got no
        # reply; and no batch is stored unless all earlier ones are.
        refused = sealed or not self._in_flight[0].doubtful
        batches = self._remove_batches()
        for batch in batches:
            batch.reset(refused=refused)
        if step is Step.REROUTE:
            log.warning(
                "%s: %s to another partition, declared as reordered: %s",
                self.group.partition_name,
                counted(sum(map(len, batches)), "message goes", "messages go"),
                error.message,
            )
        self._waits.suspend()
        self._wake.clear()
        self._owner.reassign_batches(self, batches, step)
        self._notify_if_empty()

    def _remove_batches(self) -> list[OutgoingBatch]:
        """Remove and return all batches, oldest first, and begin a new epoch."""
        self._begin_epoch()
        self.queue_open_batch()
        batches = [*self._in_flight, *self._queue]
        self._in_flight.clear()
        self._queue.clear()
        return batches

    def _give_up_oldest_batch(self, error: KeylaneError) -> None:
        oldest = self._in_flight[0]
        self._budget.give_up(oldest, error)
        self._in_flight.popleft()
        for batch in self._in_flight:
            # The broker cannot recognize the batch under a new epoch. It is stored only if the
            # oldest batch is.
            batch.reset(refused=not oldest.doubtful)
        self._begin_epoch()
        self._after_give_up()

    def _give_up_large_messages(self, error: MessageTooLargeError) -> bool:
        """
        Give up the messages of the oldest batch that exceed the partition's size limit, and send
        the others again.

        This is needed after the subject's limit was lowered. Return False if no message exceeds it.
        """
        oldest, limit_bytes = self._in_flight[0], error.limit_bytes
        sizes = list(map(oldest.size_of, range(len(oldest))))
        if limit_bytes is None or max(sizes) <= limit_bytes:
            return False
        for batch in self._in_flight:
            batch.reset(refused=True)  # no batch after a refused one is stored
        too_large, others = oldest.split(lambda index: sizes[index] > limit_bytes)
        self._budget.replace(oldest, too_large, others)
        self._in_flight.popleft()
        if others is not None:
            self._in_flight.appendleft(others)
        self._begin_epoch()
        if too_large is not None:
            self._budget.give_up(too_large, error)
        self._after_give_up()
        return True

    def _leave_lost_partition(self) -> None:
        """Give up the batches that may be stored in the lost partition, with the fate UNKNOWN, and
        hand the others to the owner.
        """
        for batch in [batch for batch in self._in_flight if batch.doubtful]:
            self._in_flight.remove(batch)
            error = DeliveryError(Reason.ACCEPTED_AS_LOST, partition_id=self.partition.partition_id)
            self._budget.give_up(batch, error)
        batches = self._remove_batches()
        self.apply_event(ExecutorEvent.SEALED)
        self._waits.end()
        self._owner.reassign_batches(self, batches, Step.NEW_ROUTE)
        self._notify_if_empty()

    def _begin_epoch(self) -> None:
        """Begin a new epoch and renumber all batches, so that the broker refuses late batches of
        the old epoch.
        """
        self._epoch = next(self._epochs)
        self._next_sequence = 0
        for batch in self._in_flight:
            batch.unpack()

    def follow_broker(self, address: str, broker: BrokerClient) -> None:
        """Send to the broker group's new address, and stop counting this partition as busy at the
        old one. Pending calls end as if they had timed out, because the old broker may hang.
        """
        self.partition = msgspec.structs.replace(self.partition, address=address)
        self._broker = broker
        for _, call in self._calls:
            self._is_recovering |= call.cancel()
        self._wake.set()
        self._broker_load.remove(self)
        self._leave_broker_load()
        self._broker_load = self._send_scheduler.get_load(address)
        self._send_scheduler.schedule(self)

    async def close(self) -> list[OutgoingBatch]:
        """Stop the task and return the unsettled batches."""
        self.queue_open_batch()
        self._channel = None
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        batches = [*self._in_flight, *self._queue]
        self._in_flight.clear()
        self._queue.clear()
        return batches
