"""Sends the parcels of one message group, in order: the only place that talks to the group's partition.

    send() ─▶ open parcel ─roll─▶ queue ─▶ in flight (a window, order kept by the sequence) ─▶ settled

A message group is (client type, subject, partition, broker group), after QMQ's send executors; there is one
executor for each, with its own queue, window and sequence, so a partition that does not answer delays no other.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections import deque
from collections.abc import Callable, Iterator
from typing import NamedTuple

import msgspec

from ..protocol.clock import Clock
from ..protocol.errors import (
    Fate,
    KeylaneError,
    ProducerFencedError,
    SequenceGapError,
    SequenceReusedError,
    StaleRouteError,
)
from ..protocol.frames import Append, Appended
from ..protocol.message import Receipt
from ..protocol.routing import OrderStrategy, Partition
from ..rpc.client import BrokerClient
from ..rpc.network import Channel
from .account import Account
from .failure import Step, decide_after_failure
from .identity import Identity
from .parcel import Parcel
from .settings import ProducerSettings

log = logging.getLogger("keylane.producer")


class MessageGroup(NamedTuple):
    """The key of an executor."""

    client_type: str
    subject: str
    partition_name: str
    broker_group: str


class Executor:
    """
    One message group's queue and its sender task.

    `spare(executor)` lists the available others; `on_leave(executor, parcels, step)` takes over, in order, all parcels
    that cannot stay (NEW_ROUTE or ELSEWHERE); `on_available()` hears that `available` changed; `on_empty(executor)`
    that nothing is left in one that is `leaving`.  `epochs` rise over all executors of a subject: a partition that is
    gone back to must not take new batches for repeats of what an earlier executor sent it.
    """

    def __init__(
        self,
        group: MessageGroup,
        partition: Partition,
        broker: BrokerClient,
        *,
        strategy: OrderStrategy,
        identity: Identity,
        settings: ProducerSettings,
        clock: Clock,
        dice: random.Random,
        spare: Callable[[Executor], list[Executor]],
        on_leave: Callable[[Executor, list[Parcel], Step], None],
        account: Account,
        epochs: Iterator[int],
        on_available: Callable[[], None],
        on_empty: Callable[[Executor], None],
    ) -> None:
        self.group = group
        self.partition = partition
        self.available = True
        """False from a failure until the broker answers again; BEST_TRIED sends elsewhere meanwhile."""
        self.sealed = False
        """True once the broker said so: nothing more is stored there."""
        self.refused = False
        """True from a refusal that asks for a newer route until the next try; its messages wait in the hold."""
        self.leaving = False
        """True once the route has no such open partition; what is here is still answered before newer messages go."""
        self.gone = False
        """True while the route has no such partition at all, open or sealed: no broker answers for it any more."""
        self.waiting_for = ""
        """Why nothing moves, for people."""
        self._broker = broker
        self._strategy = strategy
        self._identity = identity
        self._producer_id = identity.producer_id
        self._settings = settings
        self._clock = clock
        self._dice = dice
        self._spare = spare
        self._on_leave = on_leave
        self._account = account
        self._on_available = on_available
        self._on_empty = on_empty
        self._loop = asyncio.get_running_loop()
        self.open = self._new_parcel()
        self._queue: deque[Parcel] = deque()
        self._in_flight: deque[Parcel] = deque()
        self._wake = asyncio.Event()
        self._epochs = epochs
        self._epoch = next(epochs)
        self._next_sequence = 0
        self._attempt = 0
        """Failures since a batch was stored."""
        self.retries = 0
        self.closed = False
        self._task = asyncio.create_task(self._run(), name=f"send {group.partition_name}")

    def _new_parcel(self, *, reordered: bool = False) -> Parcel:
        return Parcel(self._loop.create_future(), reordered=reordered)

    # ── filling ──────────────────────────────────────────────────────────────────────────────────────
    def started(self) -> None:
        """The open parcel got its first message."""
        self.open.opened_at_ms = self._clock.boot_ms()
        self._wake.set()

    def roll(self, *, reordered: bool = False) -> None:
        """Close the open parcel to further messages and begin another."""
        if len(self.open):
            self._queue.append(self.open)
            self._account.enter(len(self.open), self.open.size)
            self._wake.set()
        self.open = self._new_parcel(reordered=reordered)

    def take_over(self, parcels: list[Parcel]) -> None:
        """Queue parcels that left another executor, behind what is here already."""
        self.roll()
        self._queue.extend(parcels)
        self._wake.set()

    @property
    def idle(self) -> bool:
        """True while there is nothing queued or in flight."""
        return not self._has_work()

    # ── sending ──────────────────────────────────────────────────────────────────────────────────────
    async def _run(self) -> None:
        while not self.closed:
            called = False
            try:
                if self.available:
                    await self._wait_for_work()
                channel = await self._broker.channel()
                if not self._has_work():
                    # Nothing to send: an open channel is all that can be known of a partition that failed.
                    self._set_available(True)
                    continue
                called = True
                await self._stream(channel)
            except KeylaneError as error:
                self._attempt += 1
                self._set_available(False)
                if self._after_failure(error, called=called):
                    continue
                self.retries += 1
                self.waiting_for = error.message
                wait_ms = self._settings.backoff.wait_ms(self._attempt, self._dice)
                log.info(
                    "%s: %s; again in %d ms", self.group.partition_name, error.message, wait_ms
                )
                await asyncio.sleep(wait_ms / 1000)

    def _has_work(self) -> bool:
        return bool(self._in_flight or self._queue or len(self.open))

    async def _wait_for_work(self) -> None:
        while not self._has_work():
            self._wake.clear()
            await self._wake.wait()

    def _set_available(self, available: bool) -> None:
        """A try has ended."""
        if self.available != available or self.refused:
            self.available = available
            self.refused = False
            self._on_available()

    async def _stream(self, channel: Channel) -> None:
        """Send until nothing is left.  On the first failure all calls are waited for, then it is raised."""
        calls: deque[tuple[Parcel, asyncio.Task[Receipt]]] = deque()
        again = deque(self._in_flight)
        try:
            while True:
                self._wake.clear()
                while calls and calls[0][1].done():
                    parcel, call = calls.popleft()
                    self._settle(parcel, call.result())
                while len(calls) < self._settings.in_flight_max:
                    next_parcel = again.popleft() if again else self._take(idle=not calls)
                    if next_parcel is None:
                        break
                    calls.append((next_parcel, self._call(channel, next_parcel)))
                if not calls and not self._has_work():
                    return
                await self._pause(idle=not calls)
        finally:
            for _, call in calls:
                if self.closed:
                    call.cancel()
            results = await asyncio.gather(*(call for _, call in calls), return_exceptions=True)
            for (parcel, _), result in zip(calls, results, strict=True):
                if isinstance(result, Receipt):
                    self._settle(parcel, result)

    async def _pause(self, *, idle: bool) -> None:
        """Wait for an answer, for a parcel to fill, or for the linger of the open one."""
        if not idle or not len(self.open):
            await self._wake.wait()
            return
        waited_ms = self._clock.boot_ms() - self.open.opened_at_ms
        try:
            async with asyncio.timeout(max(0, self._settings.linger_ms - waited_ms) / 1000):
                await self._wake.wait()
        except TimeoutError:
            pass

    def _take(self, *, idle: bool) -> Parcel | None:
        """The next parcel to go: a closed one, or the open one when nothing else is under way."""
        if not self._queue:
            if not idle or not len(self.open):
                return None
            linger_ms = self._settings.linger_ms
            if linger_ms and self._clock.boot_ms() - self.open.opened_at_ms < linger_ms:
                return None
            self.roll()
        parcel = self._queue.popleft()
        self._in_flight.append(parcel)
        return parcel

    def _call(self, channel: Channel, parcel: Parcel) -> asyncio.Task[Receipt]:
        fresh = parcel.data is None
        data = parcel.pack(
            partition_id=self.partition.partition_id,
            producer_id=self._producer_id,
            producer_epoch=self._epoch,
            sequence=self._next_sequence,
        )
        if fresh:
            self._next_sequence += len(parcel)
        parcel.tries += 1
        task = asyncio.create_task(self._append(channel, parcel, data))
        task.add_done_callback(self._answered)
        return task

    def _answered(self, _call: asyncio.Task[Receipt]) -> None:
        self._wake.set()

    async def _append(self, channel: Channel, parcel: Parcel, data: bytes) -> Receipt:
        request = Append(channel.next_id(), self.partition.partition_id)
        try:
            answer, _ = await channel.call(request, data, timeout_ms=self._settings.call_timeout_ms)
        except BaseException as error:
            if not isinstance(error, KeylaneError) or error.fate is Fate.UNKNOWN:
                parcel.doubtful = True
            raise
        assert isinstance(answer, Appended)
        return Receipt(
            self.partition.partition_id,
            answer.base_offset,
            answer.durable,
            answer.duplicate,
            parcel.reordered,
        )

    def _settle(self, parcel: Parcel, receipt: Receipt) -> None:
        self._set_available(True)
        self._attempt = 0
        self.waiting_for = ""
        self._in_flight.remove(parcel)
        parcel.settle(receipt)
        self._account.settled(parcel, None)
        self._tell_if_empty()

    def _tell_if_empty(self) -> None:
        if self.leaving and self.idle:
            self._on_empty(self)

    # ── after a failure ──────────────────────────────────────────────────────────────────────────────
    def _after_failure(self, error: KeylaneError, *, called: bool) -> bool:
        """Act on `error`, which the oldest parcel met; True if there is nothing to wait for."""
        if not self._in_flight and self._take(idle=True) is None:
            return False
        head = self._in_flight[0]
        if isinstance(error, SequenceReusedError | ProducerFencedError):
            self._new_identity()
        if not called:
            head.tries += 1
        step = decide_after_failure(
            error,
            self._strategy,
            tries=head.tries,
            tries_max=self._settings.tries_max,
            home_tries=self._settings.home_tries,
            doubtful=head.doubtful,  # what is behind it cannot be stored if it is not
            leaving=self.leaving,
            gone=self.gone,
        )
        if step is Step.ELSEWHERE and not self._spare(self):
            step = Step.AGAIN
        if step is Step.AGAIN:
            if isinstance(error, SequenceGapError) and head.tries > 1:
                # The oldest itself is ahead of what the broker remembers: nothing older is missing here.
                self._new_epoch()
            return False
        if step is Step.GIVE_UP:
            self._in_flight.popleft()
            for parcel in self._in_flight:
                # Under a new epoch the broker does not know it again: it may be stored twice, so that is declared.
                parcel.reordered = parcel.reordered or parcel.doubtful
            self._new_epoch()
            head.give_up(error)
            self._account.settled(head, error)
            self._tell_if_empty()
            return True
        self.sealed = self.sealed or isinstance(error, StaleRouteError)
        self.refused = step is Step.NEW_ROUTE
        self._new_epoch()
        self.roll()
        leaving = [*self._in_flight, *self._queue]
        self._in_flight.clear()
        self._queue.clear()
        self._on_leave(self, leaving, step)
        self._tell_if_empty()
        return step is Step.ELSEWHERE

    def _new_epoch(self) -> None:
        """Number what is left anew; the broker refuses whatever of the old epoch may still arrive."""
        self._epoch = next(self._epochs)
        self._next_sequence = 0
        for parcel in self._in_flight:
            parcel.unpack()

    def _new_identity(self) -> None:
        """Go on under another id: a second producer uses this one, and what is left here is not stored."""
        log.warning(
            "%s: the producer id %x is used by another producer; going on under a new one",
            self.group.partition_name, self._producer_id,
        )  # fmt: skip
        self._producer_id = self._identity.renew(self._producer_id)
        self._new_epoch()

    def moved(self, address: str, broker: BrokerClient) -> None:
        """The broker group has another address now."""
        self.partition = msgspec.structs.replace(self.partition, address=address)
        self._broker = broker

    async def close(self) -> list[Parcel]:
        """Stop; returns what was not settled."""
        self.closed = True
        self.roll()
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        return [*self._in_flight, *self._queue]
