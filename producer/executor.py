"""Sends the batches of a message group in order; only the executor of the group sends to its
partition.

    send() ─▶ open batch ─roll─▶ queue ─▶ in flight (a window, order kept by the sequence) ─▶
        settled

A message group is (client type, subject, partition, broker group), after QMQ's send executors. Each
has an executor with its own queue, window and sequence, so a partition that does not answer delays
no other partition.
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
from .failure import Step, decide_after_failure, wait_stage
from .flight import CROWD, ExecutorOwner, Turn
from .identity import Identity
from .outgoing_batch import OutgoingBatch, first_receipt
from .send_budget import SendBudget
from .settings import ProducerSettings
from .trying.loss import is_hopeless
from .trying.tries import failure_of, keep_trying
from .waiting import NOT_WAITING, PartitionWaits, WaitCause

log = logging.getLogger("keylane.producer")


class Executor:
    """
    One message group's queue and its sender task.

    Args:
        broker: None while the metaserver knows no address of the broker group.
        epochs: producer epochs, they rise over all executors of a subject. So when a route returns
            to an earlier partition, its broker takes no new batch for a repeat of a batch of the
            earlier executor.
    """

    def __init__(
        self,
        group: MessageGroup,
        partition: Partition,
        broker: BrokerClient | None,
        owner: ExecutorOwner[Executor],
        *,
        may_leave: bool,
        static: bool,
        identity: Identity,
        settings: ProducerSettings,
        clock: Clock,
        rng: random.Random,
        budget: SendBudget,
        epochs: Iterator[int],
        turn: Turn,
    ) -> None:
        self.group = group
        self.partition = partition
        self.state = ExecutorState(SendResult.FAILS) if broker is None else STEADY
        self._waits = PartitionWaits(group.partition_name, group.broker_group, clock)
        self._broker = broker
        self._owner = owner
        self._may_leave = may_leave
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
        """The calls under way with their batches, the oldest first."""
        self._again: deque[OutgoingBatch] = deque()
        """Batches in flight that have not been sent again yet after a failure."""
        self._channel: Channel | None = None
        """The channel through which batches are sent now; None otherwise."""
        self._of_channel: BrokerClient | None = None
        self.gathering: Gathering | None = None
        self._troubled = False
        """True from a failed call until no batch under way has failed or is doubtful; meanwhile
        only the task sends.
        """
        self._turn = turn
        self._flight = turn.flight(partition.address)
        self._flying = False
        """True while `_flight` counts this partition."""
        self.waited = False
        """True if the open batch no longer waits for an answer of other partitions."""
        self._wake = asyncio.Event()
        self._epochs = epochs
        self._epoch = next(epochs)
        self._next_sequence = 0
        self._pauses = settings.backoff.pauses(rng)
        """The pauses between tries; they are reset whenever a batch is stored."""
        self._troubles = LogFilter()
        self._fault: Exception | None = None
        """The exception that a step of sending raised outside the task, until the task raises it.
        """
        trying = keep_trying(self._try, self._failed, self._pauses, self._failure)
        self._task = start_task(trying, name=f"send {group.partition_name}")

    # ── filling ───────────────────────────────────────────────────────────────────────────────────
    def started(self) -> None:
        """Note that the open batch has its first message."""
        if self._settings.linger_ms:
            self.open.opened_at_ms = self._clock.boot_ms()
        if not self._calls:  # otherwise it is sent after their answers
            self.open.hurry = self._turn.add(self)

    def roll(self) -> None:
        """Close the open batch to further messages and begin another."""
        if self.open.values:
            self._queue.append(self._close_open())
            self._turn.add(self)

    def _close_open(self) -> OutgoingBatch:
        """Take the open batch, and begin another."""
        batch, following = self.open, OutgoingBatch(self._loop)
        count = batch.count = len(batch.values)
        self._budget.enter(count, batch.full_size - batch.room, expired=batch.expired)
        self.open = following
        return batch

    def filled(self) -> None:
        """Close the open batch, which is full, and send it now, so that the broker works while the
        next batch is filled.
        """
        self._queue.append(self._close_open())
        self.push()

    def queue(self, batch: OutgoingBatch) -> None:
        """Queue a closed batch of new messages."""
        self._budget.enter(batch.count, batch.size)
        self.take_over([batch])

    def take_over(self, batches: list[OutgoingBatch]) -> None:
        """Queue batches that left another executor, after those that are already queued here."""
        self.roll()
        self._queue.extend(batches)
        self._turn.add(self)

    def sift(self, sieve: Callable[[OutgoingBatch], OutgoingBatch | None]) -> None:
        """
        Let `sieve` remove messages from batches that were never sent.

        Args:
            sieve: returns the batch itself, a new one with the messages that stay, or None if none
                stay. It reports a batch that it replaces to the budget.
        """
        if not self.batches:
            return
        self.roll()
        sifted = {batch: batch if batch.sends else sieve(batch) for batch in self._in_flight}
        self._in_flight = deque(batch for batch in sifted.values() if batch is not None)
        self._again = deque(batch for batch in map(sifted.get, self._again) if batch is not None)
        self._queue = deque(batch for batch in map(sieve, self._queue) if batch is not None)
        self._fewer()

    @property
    def batches(self) -> list[OutgoingBatch]:
        """Return all batches that are not settled, the oldest first."""
        return [*self._in_flight, *self._queue, *([self.open] if self.open.values else [])]

    @property
    def idle(self) -> bool:
        """Return True while nothing is gathered, queued or in flight."""
        return not (self._in_flight or self._queue or self.open.values)

    @property
    def cause(self) -> WaitCause:
        """Return why messages have waited since the last failed try."""
        return self._waits.cause

    @property
    def waiting_for(self) -> str:
        """Return why messages wait; empty if none wait."""
        return self._waits.cause.reason if not self.idle or self.state.refuses else ""

    def heard(self, event: ExecutorEvent) -> None:
        """Note news of the partition from a route, the history or a refusal."""
        self.state = self.state.after(event)

    # ── sending ───────────────────────────────────────────────────────────────────────────────────
    async def _try(self) -> bool:
        """Wait for messages, and send until a failure or until the channel cannot be used any more.
        Always return False: there is always a next try.
        """
        if self.state.available:
            while self.idle:
                self._wake.clear()
                await self._wake.wait()
        if self._broker is None:
            text = "the metaserver knows no broker of this group that answers"
            raise NotSentError(text, broker_group=self.group.broker_group)
        channel = await self._broker.channel()
        if self.idle:
            # If there is nothing to send, an open channel is the only sign that the broker answers
            # again.
            self._tried(ExecutorEvent.ANSWERED)
            self._log_recovery()
        else:
            await self._stream(channel)
        return False

    def _failure(self, raised: Exception) -> KeylaneError:
        """Return the error that a try raised; an unforeseen exception is logged, and becomes an
        InternalError.
        """
        name = self.group.partition_name
        return failure_of(raised, name, self._troubles, self._clock.boot_ms())

    def _log_recovery(self) -> None:
        if failures := self._troubles.over(self._clock.boot_ms()):
            log.info("%s: sending works again, after %s", self.group.partition_name, failures)

    async def _failed(self, raised: Exception) -> bool:
        """Act on the exception of a try, and return True if the next try needs no pause."""
        error = self._failure(raised)
        self._tried(ExecutorEvent.FAILED)
        doubtful = bool(self._in_flight) and self._in_flight[0].doubtful
        hopeless = doubtful and await is_hopeless(self, error, self._owner.ask_history)
        if self._after_failure(error, hopeless=hopeless):
            return True
        self._budget.retries += 1
        log.debug("%s: %s; retrying", self.group.partition_name, error.message)
        return False

    def _tried(self, event: ExecutorEvent) -> None:
        """Note the end of a try, ANSWERED or FAILED, and notify the owner if it changes the
        state.
        """
        state = self.state.after(event)
        if state != self.state:
            self.state = state
            self._owner.availability_changed()

    def push(self) -> None:
        """Send the batches that may be sent now; the task does the work that waits for a time, for
        a channel, or for the end of a failure.
        """
        channel = self._channel
        if (
            channel is not None
            and not (self._troubled or self._again or channel.closed)
            and (self._calls or self._broker is self._of_channel)
        ):
            try:
                self._fill(channel)
                if not self._settings.linger_ms or self._calls or not self.open.values:
                    return
            except Exception as fault:  # noqa: BLE001 - raised by the task
                self._fault = fault
        self._wake.set()

    async def _stream(self, channel: Channel) -> None:
        """Send until the channel cannot be used any more. After a failure, wait for all calls under
        way, then raise the failure.
        """
        calls = self._calls
        self._channel = channel
        self._of_channel = self._broker
        self.gathering = channel if isinstance(channel, Gathering) else None
        self._again = deque(self._in_flight)
        self._troubled = any(batch.doubtful for batch in self._in_flight)
        try:
            while True:
                self._wake.clear()
                if self._fault is not None:
                    fault = self._fault
                    self._fault = None
                    raise fault
                self._settle_stored()
                if calls and calls[0][1].done():
                    calls[0][1].result()  # this raises the failure
                if not calls and (channel.closed or self._broker is not self._of_channel):
                    return
                self._fill(channel)
                await self._pause(idle=not calls)
        except asyncio.CancelledError:  # the executor is closed
            for _, call in calls:
                call.cancel()
            raise
        finally:
            self._channel = None
            self._again.clear()
            if calls:
                left, settles = list(calls), True
                calls.clear()
                try:
                    await asyncio.gather(*(call for _, call in left), return_exceptions=True)
                finally:
                    for batch, call in left:
                        # An answered batch may be sent again after a failed one, whose epoch may
                        # end.
                        batch.doubtful |= is_answered(call) or call.cancelled()
                    for batch, call in left:
                        settles = is_answered(call) and (settles or self._task.cancelling() > 0)
                        if settles:
                            self._settle(batch, call.result()[0])
            if not calls:
                self._land()

    async def _pause(self, *, idle: bool) -> None:
        """Wait until the task has something to do, or until the `linger_ms` of the open batch
        end.
        """
        if not idle or not self.open.values or not self._settings.linger_ms:
            await self._wake.wait()
            return
        waited_ms = self._clock.boot_ms() - self.open.opened_at_ms
        with suppress(TimeoutError):
            async with asyncio.timeout(max(0, self._settings.linger_ms - waited_ms) / 1000):
                await self._wake.wait()

    def _fill(self, channel: Channel) -> None:
        """Send batches until the window is full, or none is left that may be sent."""
        calls, again = self._calls, self._again
        while not calls or len(calls) < self._settings.in_flight_max:
            if again:
                batch: OutgoingBatch | None = again.popleft()
            elif self._troubled and self._still_troubled():
                # A broker recognizes its latest batches only, so a doubtful batch must not fall
                # behind newer ones.
                break
            else:
                batch = self._take(idle=not calls)
            if batch is None:
                break
            try:
                calls.append((batch, self._call(channel, batch)))
            except Exception:
                again.appendleft(batch)  # no other batch is sent before it
                raise
            if not (again or self._troubled or self._queue):
                break  # the open batch waits for an answer
        if calls and not self._flying:
            self._flying = True
            self._flight.partitions += 1

    def _land(self) -> None:
        """Let other partitions that wait send: this partition has no batch in flight any more."""
        if self._flying:
            self._flying = False
            self._flight.answered()

    def _still_troubled(self) -> bool:
        self._troubled = any(
            batch.doubtful or (call.done() and not is_answered(call)) for batch, call in self._calls
        )
        return self._troubled

    def _take(self, *, idle: bool) -> OutgoingBatch | None:
        """Put the next batch in flight: a queued batch, or the open batch if `idle` and it does not
        wait for its linger or for other partitions.
        """
        if self._queue:
            batch = self._queue.popleft()
        else:
            if not idle or not self.open.values:
                return None
            if (
                self._settings.linger_ms or self._flight.partitions >= CROWD
            ) and self._holds_back():
                return None
            self.waited = False
            batch = self._close_open()
        self._in_flight.append(batch)
        return batch

    def _holds_back(self) -> bool:
        """Return True while the open batch waits for its linger, or for an answer of other
        partitions.
        """
        if self._settings.linger_ms:
            return self._clock.boot_ms() - self.open.opened_at_ms < self._settings.linger_ms
        flight = self._flight
        if self.waited or not flight.crowded or 4 * self.open.size >= self._settings.batch_bytes:
            return False
        flight.wait(self)
        return True

    def _call(self, channel: Channel, batch: OutgoingBatch) -> Calling:
        fresh = batch.data is None
        data = batch.pack(
            partition_id=self.partition.partition_id,
            producer_id=self._producer_id,
            producer_epoch=self._epoch,
            sequence=self._next_sequence,
            compression=Compression[self._settings.compression.upper()],
        )
        if fresh:
            self._next_sequence += batch.count
        batch.sends += 1
        answered = partial(self._answered, batch)
        try:
            return channel.begin(
                Append(self.partition.partition_id),
                data,
                timeout_ms=self._settings.call_timeout_ms,
                on_answer=answered,
            )
        except Exception:
            batch.doubtful = True  # it is unknown how far it got
            raise

    def _answered(self, batch: OutgoingBatch, call: Calling) -> None:
        """Settle the stored batches, and send the batches that waited for them, as soon as the
        answer arrives.
        """
        error = call.exception()
        if error is not None:
            self._troubled = True
            if not isinstance(error, KeylaneError) or error.fate is Fate.UNKNOWN:
                batch.doubtful = True
            self._wake.set()
            return
        try:
            self._settle_stored()
            if self._channel is not None:
                if not self._calls:
                    self._land()
                if self._troubled or self._in_flight or self._queue or self.open.values:
                    self.push()
        except Exception as fault:  # noqa: BLE001 - raised by the task
            self._fault = fault
            self._wake.set()

    def _settle_stored(self) -> None:
        """Settle the oldest batches, as far as they are stored."""
        calls = self._calls
        while calls and is_answered(calls[0][1]):
            batch, call = calls[0]
            self._settle(batch, call.result()[0])
            calls.popleft()

    def _settle(self, batch: OutgoingBatch, answer: Answer) -> None:
        assert type(answer) is Appended
        if self.state is not STEADY and not self.state.available:
            self._tried(ExecutorEvent.ANSWERED)
        if self._pauses.failures:
            self._pauses.reset()
            self._log_recovery()
        if batch in self._in_flight:  # otherwise settled again, after a later fault
            self._budget.stored(batch, first_receipt(answer, self.partition, static=self._static))
            self._in_flight.remove(batch)
        if self._waits.cause is not NOT_WAITING:
            self._waits.over()
        if self.state is not STEADY:
            self._tell_if_empty()

    def _fewer(self) -> None:
        """Note that messages were given up."""
        if self.idle:
            self._waits.over()
        self._tell_if_empty()

    def _tell_if_empty(self) -> None:
        if self.state.left and self.idle:
            self._owner.emptied(self)

    # ── after a failure ───────────────────────────────────────────────────────────────────────────
    def _after_failure(self, error: KeylaneError, *, hopeless: bool) -> bool:
        """Act on the failure of the oldest batch, and return True if the next try needs no
        pause.
        """
        if not self._in_flight and self._take(idle=True) is None:
            return False
        if self.state.lost:
            self._leave_lost()
            return True
        if isinstance(error, MessageTooLargeError) and self._give_up_large(error):
            return True
        step = self._next_step(error, hopeless=hopeless)
        renamed = isinstance(error, SequenceReusedError | ProducerFencedError)
        if renamed:
            self._producer_id = self._identity.renew(self._producer_id, self.group.partition_name)
        if step is Step.AGAIN:
            # A gap before the oldest batch means that the broker has forgotten this producer: no
            # older batch is missing.
            forgotten = isinstance(error, SequenceGapError) and self._in_flight[0].sends > 1
            if forgotten or renamed:
                for batch in self._in_flight:
                    # Under a new number the broker does not recognize a batch that it may have
                    # stored.
                    batch.leave(refused=False)
                self._new_epoch()
            return False
        if step is Step.GIVE_UP:
            self._give_up_oldest(error)
            return True
        self._leave_partition(error, step)
        return step is Step.ELSEWHERE

    def _next_step(self, error: KeylaneError, *, hopeless: bool) -> Step:
        """Count a failure for every closed batch, and decide the next step."""
        now_ms = self._clock.boot_ms()
        self._waits.begin(error, now_ms, self.batches, self.partition.address)
        for batch in (*self._in_flight, *self._queue):
            batch.failed(now_ms)
        head = self._in_flight[0]
        since_ms = self._waits.since_ms
        assert since_ms is not None
        assert head.failed_at_ms is not None
        stage = wait_stage(
            self._settings,
            may_leave=self._may_leave,
            tries=head.tries,
            waited_ms=now_ms - head.failed_at_ms,
            failing_ms=now_ms - since_ms,
        )
        step = decide_after_failure(
            error,
            stage,
            left=self.state.left,
            hopeless=hopeless,
            doubtful=head.doubtful,  # if it is not doubtful, later batches cannot be stored
        )
        if step is Step.ELSEWHERE and not self._owner.has_spare(self):
            return Step.AGAIN
        return step

    def _leave_partition(self, error: KeylaneError, step: Step) -> None:
        """Hand all batches to the owner: they go to another partition, or wait for a newer
        route.
        """
        sealed = isinstance(error, StaleRouteError)
        if sealed:
            self.heard(ExecutorEvent.SEALED)
        if step is Step.NEW_ROUTE:
            self.heard(ExecutorEvent.ROUTE_NEEDED)
        # A sealed partition has not stored the batch that it refused, even if an earlier try had no
        # answer. If a batch is not stored, the batches after it are not stored either.
        refused = sealed or not self._in_flight[0].doubtful
        leaving = self._take_all()
        for batch in leaving:
            batch.leave(refused=refused)
        if step is Step.ELSEWHERE:
            log.warning(
                "%s: %s to another partition, declared as reordered: %s",
                self.group.partition_name,
                counted(sum(map(len, leaving)), "message goes", "messages go"),
                error.message,
            )
        self._waits.left()
        self._owner.take_back(self, leaving, step)
        self._tell_if_empty()

    def _take_all(self) -> list[OutgoingBatch]:
        """Remove all batches, the oldest first, and begin a new epoch."""
        self._new_epoch()
        self.roll()
        batches = [*self._in_flight, *self._queue]
        self._in_flight.clear()
        self._queue.clear()
        return batches

    def _give_up_oldest(self, error: KeylaneError) -> None:
        head = self._in_flight[0]
        self._budget.give_up(head, error)
        self._in_flight.popleft()
        for batch in self._in_flight:
            # The broker does not recognize the batch under a new epoch. The batch is not stored if
            # the oldest batch is not.
            batch.leave(refused=not head.doubtful)
        self._new_epoch()
        self._fewer()

    def _give_up_large(self, error: MessageTooLargeError) -> bool:
        """
        Give up the messages of the oldest batch that are over the partition's limit, and send the
        others again.

        This happens after the subject's limit was lowered. Return False if no message is over it.
        """
        head, limit = self._in_flight[0], error.limit_bytes
        sizes = list(map(head.size_of, range(len(head))))
        if limit is None or max(sizes) <= limit:
            return False
        for batch in self._in_flight:
            batch.leave(refused=True)  # the refused batch is not stored, so no later batch is
        large, others = head.divided(lambda index: sizes[index] > limit)
        self._budget.replaced(head, large, others)
        self._in_flight.popleft()
        if others is not None:
            self._in_flight.appendleft(others)
        self._new_epoch()
        if large is not None:
            self._budget.give_up(large, error)
        self._fewer()
        return True

    def _leave_lost(self) -> None:
        """Give up batches that may be stored in the lost partition, with an unknown fate, and hand
        the others to the owner.
        """
        for batch in [batch for batch in self._in_flight if batch.doubtful]:
            self._in_flight.remove(batch)
            error = DeliveryError(Reason.ACCEPTED_AS_LOST, partition_id=self.partition.partition_id)
            self._budget.give_up(batch, error)
        leaving = self._take_all()
        self.heard(ExecutorEvent.SEALED)
        self._waits.over()
        self._owner.take_back(self, leaving, Step.NEW_ROUTE)
        self._tell_if_empty()

    def _new_epoch(self) -> None:
        """Number all batches again under a new epoch; the broker refuses batches of the old epoch
        that arrive later.
        """
        self._epoch = next(self._epochs)
        self._next_sequence = 0
        for batch in self._in_flight:
            batch.unpack()

    def moved(self, address: str, broker: BrokerClient) -> None:
        """Follow the broker group to a new address; the batches in flight still count at the old
        address.
        """
        self.partition = msgspec.structs.replace(self.partition, address=address)
        self._broker = broker
        self._flight.forget(self)
        self._land()
        self._flight = self._turn.flight(address)
        self._turn.add(self)

    async def close(self) -> list[OutgoingBatch]:
        """Stop, and return the batches that are not settled."""
        self.roll()
        self._channel = None
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        batches = [*self._in_flight, *self._queue]
        self._in_flight.clear()
        self._queue.clear()
        return batches
