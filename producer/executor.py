"""Sends the batches of one message group, in order: the only place that talks to the group's partition.

    send() ─▶ open batch ─roll─▶ queue ─▶ in flight (a window, order kept by the sequence) ─▶ settled

A message group is (client type, subject, partition, broker group), after QMQ's send executors; there is one
executor for each, with its own queue, window and sequence, so a partition that does not answer delays no other.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections import deque
from collections.abc import Callable, Collection, Iterator
from typing import NamedTuple, Protocol

import msgspec

from ..protocol.clock import Clock
from ..protocol.errors import (
    AcceptedAsLostError,
    Fate,
    KeylaneError,
    NotSentError,
    ProducerFencedError,
    SequenceGapError,
    SequenceReusedError,
    StaleRouteError,
    SubjectUnknownError,
)
from ..protocol.frames import Append, Appended
from ..protocol.message import Receipt
from ..protocol.routing import Partition
from ..protocol.text import counted
from ..rpc.client import BrokerClient
from ..rpc.network import Channel
from .executor_state import ExecutorEvent, ExecutorState, Reach
from .failure import NOT_HERE, Step, decide_after_failure, wait_stage
from .identity import Identity
from .outgoing_batch import OutgoingBatch
from .send_budget import SendBudget
from .settings import ProducerSettings
from .waiting import WaitReport

log = logging.getLogger("keylane.producer")


class MessageGroup(NamedTuple):
    """The key of an executor."""

    client_type: str
    subject: str
    partition_name: str
    broker_group: str


class ExecutorOwner(Protocol):
    """What an executor needs of the sender of its subject."""

    def has_spare(self, executor: Executor) -> bool:
        """True if another executor is available."""
        ...

    def take_back(self, executor: Executor, batches: list[OutgoingBatch], step: Step) -> None:
        """Take all batches that cannot stay, in order; `step` is NEW_ROUTE or ELSEWHERE."""
        ...

    def availability_changed(self) -> None:
        """An executor's broker fails, or answers again."""
        ...

    def emptied(self, executor: Executor) -> None:
        """An executor whose partition the route has left has nothing more."""
        ...

    async def ask_history(self) -> Collection[str]:
        """
        Ask the metaserver which partitions are lost and where their brokers are now, and tell executors of it.

        Returns:
            The names of the broker groups that are silent.

        Raises:
            KeylaneError: as the call raised it.
        """
        ...


class Executor:
    """
    One message group's queue and its sender task.

    Args:
        broker: None while the metaserver knows no address of its broker group.
        epochs: rise over all executors of a subject: a partition that is gone back to must not take new batches for
            repeats of what an earlier executor sent it.
    """

    def __init__(
        self,
        group: MessageGroup,
        partition: Partition,
        broker: BrokerClient | None,
        owner: ExecutorOwner,
        *,
        may_leave: bool,
        identity: Identity,
        settings: ProducerSettings,
        clock: Clock,
        rng: random.Random,
        budget: SendBudget,
        epochs: Iterator[int],
    ) -> None:
        self.group = group
        self.partition = partition
        self.state = ExecutorState(Reach.FAILS if broker is None else Reach.ANSWERS)
        self._waiting_for = ""
        """Why nothing moves, for people."""
        self._report = WaitReport()
        self._broker = broker
        self._owner = owner
        self._may_leave = may_leave
        self._identity = identity
        self._producer_id = identity.producer_id
        self._settings = settings
        self._clock = clock
        self._rng = rng
        self._budget = budget
        self._loop = asyncio.get_running_loop()
        self.open = self._new_batch()
        self._queue: deque[OutgoingBatch] = deque()
        self._in_flight: deque[OutgoingBatch] = deque()
        self._wake = asyncio.Event()
        self._epochs = epochs
        self._epoch = next(epochs)
        self._next_sequence = 0
        self._attempt = 0
        """Failures since a batch was stored."""
        self.retries = 0
        self._task = asyncio.create_task(self._run(), name=f"send {group.partition_name}")

    def _new_batch(self) -> OutgoingBatch:
        return OutgoingBatch(self._loop.create_future())

    # ── filling ──────────────────────────────────────────────────────────────────────────────────────
    def started(self) -> None:
        """The open batch got its first message."""
        self.open.opened_at_ms = self._clock.boot_ms()
        self._wake.set()

    def roll(self) -> None:
        """Close the open batch to further messages and begin another."""
        if len(self.open):
            self._queue.append(self.open)
            self._budget.enter(len(self.open), self.open.size)
            self._wake.set()
        self.open = self._new_batch()

    def take_over(self, batches: list[OutgoingBatch]) -> None:
        """Queue batches that left another executor, behind what is here already."""
        self.roll()
        self._queue.extend(batches)
        self._wake.set()

    def sift(self, sieve: Callable[[OutgoingBatch], OutgoingBatch | None]) -> None:
        """
        Let `sieve` take messages out of what was never sent: it returns what stays of a batch.

        A batch of which something was taken is another one afterwards; the budget is told of that by `sieve`.
        """
        if not self._has_work():
            return
        self.roll()
        kept = [one if one.sends else sieve(one) for one in self._in_flight]
        self._in_flight = deque(one for one in kept if one is not None)
        self._queue = deque(one for one in map(sieve, self._queue) if one is not None)
        if self.idle:
            self._moves_again()
        self._tell_if_empty()

    @property
    def batches(self) -> list[OutgoingBatch]:
        """All that is here, oldest first."""
        return [*self._in_flight, *self._queue, *([self.open] if len(self.open) else [])]

    @property
    def idle(self) -> bool:
        """True while there is nothing queued or in flight."""
        return not self._has_work()

    @property
    def waiting_for(self) -> str:
        """Why messages wait, for people; nothing if none do."""
        return self._waiting_for if self._has_work() or self.state.refuses else ""

    def heard(self, event: ExecutorEvent) -> None:
        """A route or the history says something of the partition."""
        self.state = self.state.after(event)

    # ── sending ──────────────────────────────────────────────────────────────────────────────────────
    async def _run(self) -> None:
        while True:
            try:
                if self.state.available:
                    await self._wait_for_work()
                if self._broker is None:
                    text = "the metaserver knows no broker of this group that answers"
                    raise NotSentError(text, broker_group=self.group.broker_group)
                channel = await self._broker.channel()
                if not self._has_work():
                    # Nothing to send: an open channel is all that can be known of a partition that failed.
                    self._tried(ExecutorEvent.ANSWERED)
                    continue
                await self._stream(channel)
            except KeylaneError as error:
                self._attempt += 1
                self._tried(ExecutorEvent.FAILED)
                if self._after_failure(error, hopeless=await self._hopeless(error)):
                    continue
                self.retries += 1
                wait_ms = self._settings.backoff.wait_ms(self._attempt, self._rng)
                log.debug(
                    "%s: %s; again in %d ms", self.group.partition_name, error.message, wait_ms
                )
                await asyncio.sleep(wait_ms / 1000)

    def _has_work(self) -> bool:
        return bool(self._in_flight or self._queue or len(self.open))

    async def _wait_for_work(self) -> None:
        while not self._has_work():
            self._wake.clear()
            await self._wake.wait()

    def _tried(self, event: ExecutorEvent) -> None:
        """A try has ended."""
        state = self.state.after(event)
        if state != self.state:
            self.state = state
            self._owner.availability_changed()

    async def _stream(self, channel: Channel) -> None:
        """Send until nothing is left.  On the first failure all calls are waited for, then it is raised."""
        calls: deque[tuple[OutgoingBatch, asyncio.Task[Receipt]]] = deque()
        again = deque(self._in_flight)
        try:
            while True:
                self._wake.clear()
                while calls and calls[0][1].done():
                    batch, call = calls.popleft()
                    self._settle(batch, call.result())
                while len(calls) < self._settings.in_flight_max:
                    if not again and any(batch.doubtful for batch, _ in calls):
                        break  # a broker knows only the latest batches again: nothing newer until this is answered
                    next_batch = again.popleft() if again else self._take(idle=not calls)
                    if next_batch is None:
                        break
                    calls.append((next_batch, self._call(channel, next_batch)))
                if not calls and not self._has_work():
                    return
                await self._pause(idle=not calls)
        except asyncio.CancelledError:  # the executor is closed
            for _, call in calls:
                call.cancel()
            raise
        finally:
            results = await asyncio.gather(*(call for _, call in calls), return_exceptions=True)
            for (batch, _), result in zip(calls, results, strict=True):
                if isinstance(result, Receipt):
                    self._settle(batch, result)

    async def _pause(self, *, idle: bool) -> None:
        """Wait for an answer, for a batch to fill, or for the linger of the open one."""
        if not idle or not len(self.open):
            await self._wake.wait()
            return
        waited_ms = self._clock.boot_ms() - self.open.opened_at_ms
        try:
            async with asyncio.timeout(max(0, self._settings.linger_ms - waited_ms) / 1000):
                await self._wake.wait()
        except TimeoutError:
            pass

    def _take(self, *, idle: bool) -> OutgoingBatch | None:
        """The next batch to go: a closed one, or the open one when nothing else is under way."""
        if not self._queue:
            if not idle or not len(self.open):
                return None
            linger_ms = self._settings.linger_ms
            if linger_ms and self._clock.boot_ms() - self.open.opened_at_ms < linger_ms:
                return None
            self.roll()
        batch = self._queue.popleft()
        self._in_flight.append(batch)
        return batch

    def _call(self, channel: Channel, batch: OutgoingBatch) -> asyncio.Task[Receipt]:
        fresh = batch.data is None
        data = batch.pack(
            partition_id=self.partition.partition_id,
            producer_id=self._producer_id,
            producer_epoch=self._epoch,
            sequence=self._next_sequence,
        )
        if fresh:
            self._next_sequence += len(batch)
        batch.sends += 1
        task = asyncio.create_task(self._append(channel, batch, data))
        task.add_done_callback(self._answered)
        return task

    def _answered(self, _call: asyncio.Task[Receipt]) -> None:
        self._wake.set()

    async def _append(self, channel: Channel, batch: OutgoingBatch, data: bytes) -> Receipt:
        request = Append(self.partition.partition_id)
        try:
            answer, _ = await channel.call(request, data, timeout_ms=self._settings.call_timeout_ms)
        except BaseException as error:
            if not isinstance(error, KeylaneError) or error.fate is Fate.UNKNOWN:
                batch.doubtful = True
            raise
        assert isinstance(answer, Appended)
        return Receipt(
            self.partition.partition_id,
            answer.base_offset,
            answer.durable,
            answer.duplicate,
        )

    def _settle(self, batch: OutgoingBatch, receipt: Receipt) -> None:
        self._tried(ExecutorEvent.ANSWERED)
        self._attempt = 0
        self._in_flight.remove(batch)
        self._budget.stored(batch, receipt)
        self._moves_again()
        self._tell_if_empty()

    def _tell_if_empty(self) -> None:
        if self.state.left and self.idle:
            self._owner.emptied(self)

    # ── after a failure ──────────────────────────────────────────────────────────────────────────────
    async def _hopeless(self, error: KeylaneError) -> bool:
        """
        True if nobody can tell any more whether the oldest batch is stored, and no loss was accepted.

        A broker that does not have the partition may be the empty one in the place of a lost one, or have the address
        of one that moved.  The metaserver knows, and is asked after the refusal: an earlier answer may be of before.
        """
        doubtful = bool(self._in_flight) and self._in_flight[0].doubtful
        state = self.state
        if state.lost or not (state.gone and doubtful and isinstance(error, NOT_HERE)):
            return False
        address = self.partition.address
        try:
            if self.partition.broker_group in await self._owner.ask_history():
                return False
        except SubjectUnknownError:
            pass
        except KeylaneError as silent:
            log.debug("%s: history: %s", self.group.partition_name, silent.message)
            return False
        return self.state.gone and not self.state.lost and self.partition.address == address

    def _after_failure(self, error: KeylaneError, *, hopeless: bool) -> bool:
        """Act on `error`, which the oldest batch met; True if there is nothing to wait for."""
        if not self._in_flight and self._take(idle=True) is None:
            return False
        if self.state.lost:
            self._leave_lost()
            return True
        step = self._next_step(error, hopeless=hopeless)
        renamed = isinstance(error, SequenceReusedError | ProducerFencedError)
        if renamed:
            self._new_identity()
        if step is Step.AGAIN:
            # A gap before the oldest itself: the broker has forgotten this producer, and nothing older is missing here.
            forgotten = isinstance(error, SequenceGapError) and self._in_flight[0].sends > 1
            if forgotten or renamed:
                for batch in self._in_flight:
                    # Under another number the broker does not know again what it may have stored.
                    batch.leave(refused=False)
                self._new_epoch()
            return False
        if step is Step.GIVE_UP:
            self._give_up_oldest(error)
            return True
        self._leave_partition(error, step)
        return step is Step.ELSEWHERE

    def _next_step(self, error: KeylaneError, *, hopeless: bool) -> Step:
        """Count a failure of everything here, and decide what follows."""
        now_ms = self._clock.boot_ms()
        self._wait_on(error, now_ms)
        for batch in (*self._in_flight, *self._queue):
            batch.failed(now_ms)
        head = self._in_flight[0]
        since_ms = self._report.since_ms
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
            doubtful=head.doubtful,  # what is behind it cannot be stored if it is not
            left=self.state.left,
            hopeless=hopeless,
        )
        if step is Step.ELSEWHERE and not self._owner.has_spare(self):
            return Step.AGAIN
        return step

    def _leave_partition(self, error: KeylaneError, step: Step) -> None:
        """Everything here goes elsewhere, or waits for a newer route."""
        sealed = isinstance(error, StaleRouteError)
        if sealed:
            self.heard(ExecutorEvent.SEALED)
        if step is Step.NEW_ROUTE:
            self.heard(ExecutorEvent.ROUTE_NEEDED)
        # A sealed partition has stored nothing of what it refused, whatever became of earlier tries; and nothing behind
        # a batch that is not stored is stored.
        refused = sealed or not self._in_flight[0].doubtful
        leaving = self._take_all()
        for batch in leaving:
            batch.leave(refused=refused)
        if step is Step.ELSEWHERE:
            log.warning(
                "%s: %s to another partition, declared as reordered: %s",
                self.group.partition_name,
                counted(sum(map(len, leaving)), "message goes", "messages go"), error.message,
            )  # fmt: skip
        self._report.over(self._clock.boot_ms())
        self._owner.take_back(self, leaving, step)
        self._tell_if_empty()

    def _take_all(self) -> list[OutgoingBatch]:
        """All batches, oldest first, out of the executor; a new epoch, because they are numbered anew elsewhere."""
        self._new_epoch()
        self.roll()
        batches = [*self._in_flight, *self._queue]
        self._in_flight.clear()
        self._queue.clear()
        return batches

    def _give_up_oldest(self, error: KeylaneError) -> None:
        head = self._in_flight.popleft()
        for batch in self._in_flight:
            # Under a new epoch the broker does not know it again.  It cannot be stored if the oldest is not.
            batch.leave(refused=not head.doubtful)
        self._new_epoch()
        self._budget.give_up(head, error)
        if self.idle:
            self._moves_again()
        self._tell_if_empty()

    def _wait_on(self, error: KeylaneError, now_ms: int) -> None:
        """Messages wait because of `error`; people are told of it now and then."""
        self._waiting_for = error.message
        if not self._report.waits(now_ms):
            return
        batches = self.batches
        oldest_ms = self._clock.wall_ms() - batches[0].times[0] // 1_000_000
        log.warning(
            "%s at %s: %s, the oldest for %.0f s: %s",
            self.group.partition_name,
            self.partition.address or f"broker group {self.group.broker_group}",
            counted(sum(map(len, batches)), "message waits", "messages wait"), max(0, oldest_ms) / 1000, error.message,
        )  # fmt: skip

    def _moves_again(self) -> None:
        """Messages are stored again, or none is left that waits."""
        self._waiting_for = ""
        if self._report.since_ms is None:
            return
        took_ms = self._report.over(self._clock.boot_ms())
        if took_ms is not None:
            log.warning(
                "%s: messages wait no longer, after %.0f s",
                self.group.partition_name,
                took_ms / 1000,
            )

    def _leave_lost(self) -> None:
        """What may be stored in a lost partition fails, its fate unknown; what cannot be goes on elsewhere, in order."""
        for batch in [batch for batch in self._in_flight if batch.doubtful]:
            self._in_flight.remove(batch)
            error = AcceptedAsLostError(partition_id=self.partition.partition_id)
            self._budget.give_up(batch, error)
        leaving = self._take_all()
        self.heard(ExecutorEvent.SEALED)
        self._moves_again()
        self._owner.take_back(self, leaving, Step.NEW_ROUTE)
        self._tell_if_empty()

    def _new_epoch(self) -> None:
        """Number what is left anew; the broker refuses whatever of the old epoch may still arrive."""
        self._epoch = next(self._epochs)
        self._next_sequence = 0
        for batch in self._in_flight:
            batch.unpack()

    def _new_identity(self) -> None:
        """Go on under another id: a second producer uses this one, and what is left here is not stored."""
        log.warning(
            "%s: the producer id %x is used by another producer; going on under a new one",
            self.group.partition_name, self._producer_id,
        )  # fmt: skip
        self._producer_id = self._identity.renew(self._producer_id)

    def moved(self, address: str, broker: BrokerClient) -> None:
        """The broker group has another address now."""
        self.partition = msgspec.structs.replace(self.partition, address=address)
        self._broker = broker

    async def close(self) -> list[OutgoingBatch]:
        """Stop; returns what was not settled."""
        self.roll()
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        return [*self._in_flight, *self._queue]
