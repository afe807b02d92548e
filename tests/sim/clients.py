"""Simulated producers and consumers: the real ones, with a workload, and a record of what they saw."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import math
from collections.abc import Callable
from typing import Any

from history.observation import Telling, dropped, ended, started
from keylane.cli.history.events import Event, Routed, Sent, Settled
from keylane.consumer.client import Consumer
from keylane.consumer.settings import ConsumerSettings
from keylane.consumer.workers import Workers
from keylane.producer.client import Producer
from keylane.producer.sender import SubjectSender
from keylane.producer.settings import ProducerSettings
from keylane.producer.ticket import Ticket
from keylane.protocol.backoff import Backoff
from keylane.protocol.errors import (
    DeliveryTimeoutError,
    Fate,
    KeyHaltedError,
    KeylaneError,
    QueueFullError,
)
from keylane.protocol.ids import Subject
from keylane.protocol.message import Message
from keylane.protocol.routing import Partition, Route
from keylane.rpc.identity import DrawBits
from sim.hosts import BrokerHost, Host
from sim.network import SimNetwork
from sim.promises import is_sealed

Record = Callable[[Event], None]
SUBJECT = "orders"
TWINS_ID = 1 << 60


class ProducerHost(Host):
    """Sends bursts of messages over a few keys until it is told to stop."""

    def __init__(
        self,
        *args: Any,
        record: Record,
        meta: list[str],
        keys: list[bytes],
        settings: dict[str, Any],
        strict: bool,
        brokers: list[BrokerHost],
        padding_bytes: int,
        pace: float,
        identity: DrawBits,
        twins: bool,
    ) -> None:
        super().__init__(*args)
        self._identity = identity
        self._twins = twins
        self._pace = pace
        self._padding_bytes = padding_bytes
        self._record = record
        self._meta = meta
        self._keys = keys
        self._settings = settings
        self._strict = strict
        self._brokers = brokers
        self.waiting: dict[bytes, None] = {}
        """Messages sent whose fate is not known yet."""
        self.busy = False
        """True until `count` messages are sent."""
        self._producer: Producer | None = None
        self._closing = False
        self._number = 0
        """Of the next message of this process."""
        self._route: Route | None = None
        self._watched: SubjectSender | None = None
        self._sent_at: dict[bytes, float] = {}
        self._leave_after_s = settings["leave_after_ms"] / 1000 * 0.9
        """What a message waits at least before any leaves its partition, by a clock that drifts."""
        self._long_wait = math.inf
        """When the first message was sent that waited so long."""
        self._limits = copy.copy(self.dice)
        """How long messages may take."""
        self._limited = 0.05 if self._limits.random() < 0.3 else 0.0

    def start(self, count: int) -> None:
        process = self.new_process()
        self._closing = False
        self._route = None
        self._sent_at.clear()
        self._long_wait = math.inf
        self.busy = True
        self.spawn(self._run(count), process.context.copy())

    def end(self, *, machine_down: bool) -> None:
        super().end(machine_down=machine_down)
        for value in self.waiting:
            self._record(Settled(value, "gone"))
        self.waiting.clear()
        self.busy = False
        self._producer = None

    def close(self) -> None:
        """Have it closed at once, whatever it has not sent yet."""
        if self.running and not self._closing and self._producer is not None:
            self._closing = True
            work = self._close(self._producer)
            self.process.context.copy().run(self.spawn, work, self.process.context.copy())

    async def _close(self, producer: Producer) -> None:
        await producer.close(flush=False)
        while self.waiting:  # each is told before this process ends
            await asyncio.sleep(0.001)
        self.end(machine_down=False)

    def _new_identity(self) -> DrawBits:
        """Where a process has its ids from; of twins the first is the same, as after the copy of a whole machine."""
        first = [TWINS_ID] if self._twins else []
        return lambda bits: first.pop() if first else self._identity(bits)

    async def _run(self, count: int) -> None:
        producer = Producer(
            self._meta,
            settings=ProducerSettings(**self._settings),
            network=SimNetwork(self.internet, self.process),
            clock=self.machine,
            dice=self.dice,
            _identity=self._new_identity(),
        )
        # What the metaserver's health call needs is a metaserver: ask until one answers.
        while True:
            try:
                await producer.__aenter__()
                break
            except KeylaneError:
                await asyncio.sleep(0.2)
        self._producer = producer
        self._number = 0
        dice = self.dice
        while self._number < count and not self._closing:
            left = count - self._number
            await self._send(producer, min(left, dice.choice((1, 1, 2, 5, 20))))
            pause_s = dice.choice((0, 0.01, 0.1, 0.5, 1.0)) * dice.random()
            await asyncio.sleep(self._pace * pause_s)
        self.busy = False

    def burst(self) -> None:
        """Send some more, now."""
        if self.running and not self._closing and self._producer is not None:
            work = self._send(self._producer, 6)
            self.process.context.copy().run(self.spawn, work, self.process.context.copy())

    async def _send(self, producer: Producer, count: int) -> None:
        name, dice = f"{self.name}.{self.starts}", self.dice
        for _ in range(count):
            key = dice.choice(self._keys) if dice.random() < 0.97 else b""
            value = b"%s:%d" % (name.encode(), self._number)
            value += b"." * int(self._padding_bytes * dice.random() ** 3)
            if self._closing:
                return
            try:
                ticket = producer.send(SUBJECT, value, key=key, timeout=self._time_limit())
                self._watch_routes(producer, name)
            except QueueFullError:
                await producer.room()
                continue
            except KeyHaltedError:
                await asyncio.sleep(0.1)
                continue
            self._record(Sent(value, key, name, self._number, self._strict))
            self.waiting[value] = None
            self._sent_at[value] = self.loop.now
            self.spawn(self._settle(producer, ticket, value), self.process.context.copy())
            self._number += 1

    def _watch_routes(self, producer: Producer, name: str) -> None:
        """Note each route at the moment in which it is followed, when that is another one."""
        sender = producer._senders[Subject(SUBJECT)]
        if sender is self._watched:
            return
        self._watched = sender
        refill = sender._refill

        def note() -> None:
            route = sender._route
            if route is not None and route is not self._route:
                self._route = route
                found = route.open_partitions()
                ids = sorted(one.partition_id for one in found)
                self._record(Routed(name, route.version, tuple(ids)))
                if self._strict:
                    self._check_sealed(found)

        def refilled() -> None:
            note()
            refill()

        sender._refill = refilled  # type: ignore[method-assign]
        note()

    def _check_sealed(self, found: tuple[Partition, ...]) -> None:
        """What a partition continues takes no more messages before anybody hears of it, unless that was given up."""
        for one in found:
            for parent in one.parents:
                stores = [host.store for host in self._brokers if host.running and not host.copied]
                if is_sealed(stores, parent) is False:
                    said = f"partition {one.partition_id} was opened before {parent} was sealed"
                    self.loop.faults.append(said)

    def _time_limit(self) -> float | None:
        if not self._limited or self._limits.random() >= self._limited:
            return None
        return self._limits.choice((0.2, 1.0, 3.0))

    async def _settle(self, producer: Producer, ticket: Ticket, value: bytes) -> None:
        try:
            receipt = await ticket
        except KeylaneError as error:
            asked = isinstance(error, DeliveryTimeoutError | KeyHaltedError)
            told = ("withdrawn", "gone") if self._closing or asked else ("not done", "unknown")
            outcome = told[error.fate is not Fate.NOT_DONE]
            self._record(Settled(value, outcome))
            if isinstance(error, DeliveryTimeoutError):
                await asyncio.sleep(0.05)
                producer.resume(error)
        else:
            place, twice = (receipt.partition_id, receipt.offset), receipt.duplicate == "possible"
            self._record(Settled(value, "stored", *place, receipt.reordered, twice))
            if receipt.reordered:
                self._check_patience(value)
        if self.loop.now - self._sent_at[value] >= self._leave_after_s:
            self._long_wait = min(self._long_wait, self._sent_at[value])
        del self.waiting[value]

    def _check_patience(self, value: bytes) -> None:
        """Nothing leaves its partition before some message, not newer, has waited for it long enough."""
        sent_at, now = self._sent_at[value], self.loop.now
        waits = any(
            self._sent_at[other] <= min(sent_at, now - self._leave_after_s)
            for other in self.waiting
        )
        if not waits and self._long_wait > sent_at:
            self.loop.faults.append(f"{value!r} is reordered, though nothing waited for long")


class ConsumerHost(Host):
    """Handles what it is given, slowly at times, failing at times; joins, leaves, crashes as it is told."""

    def __init__(
        self,
        *args: Any,
        record: Record,
        meta: list[str],
        group: str,
        ttl_ms: int,
        manners: dict[str, float],
        settings: dict[str, Any],
        left_ms: Callable[[str], int | None],
        identity: DrawBits,
    ) -> None:
        super().__init__(*args)
        self._identity = identity
        self._left_ms = left_ms
        self._record = record
        self._meta = meta
        self.group = group
        self._manners = manners
        self._settings = ConsumerSettings(
            ttl_ms=ttl_ms,
            call_timeout_ms=1_000,
            pull_wait_ms=1_000,
            handover_ms=500,
            handler_backoff=Backoff(first_ms=50, max_ms=500),
            **settings,
        )
        self.calm = False
        """True once handlers are quick and never fail."""
        self.consumer: Consumer | None = None
        self._bodies = copy.copy(self.dice)
        """How long the bodies of an iteration take."""
        self._bad_keys = copy.copy(self.dice).random() < manners["bad_keys"]
        """Every second key fails, in handlers that wait, until all is calm."""
        self.inside = 0
        """Handlers that run."""
        self._in_hand: Message | None = None
        """What the body of an iteration is in."""

    def start(self) -> None:
        process = self.new_process()
        self.leaving = False
        self.spawn(self._run(), process.context.copy())

    def leave(self) -> None:
        """Close in good manners."""
        if self.running and not self.leaving and self.consumer is not None:
            self.leaving = True
            self.process.context.copy().run(self._close)

    def _close(self) -> None:
        self.spawn(self._leave(), self.process.context.copy())

    def suspend(self, seconds: float) -> None:
        """Take no part for a while."""
        if self.running and not self.leaving and self.consumer is not None:
            work = self._suspend(self.consumer, seconds)
            self.process.context.copy().run(self.spawn, work, self.process.context.copy())

    async def _suspend(self, consumer: Consumer, seconds: float) -> None:
        with contextlib.suppress(KeylaneError):  # told or not: it goes on in good time
            await consumer.suspend()
        await asyncio.sleep(seconds)
        while self.consumer is consumer:
            try:
                await consumer.resume()
                return
            except KeylaneError:
                await asyncio.sleep(0.2)

    async def _leave(self) -> None:
        assert self.consumer is not None
        consumer, self.consumer = self.consumer, None
        if self._in_hand is not None:  # closing gives it up, as the user is told
            self._record(dropped(self._in_hand))
        await consumer.close()
        self.end(machine_down=False)

    def end(self, *, machine_down: bool) -> None:
        super().end(machine_down=machine_down)
        self.leaving = False
        self.inside = 0
        self.consumer = self._in_hand = None

    async def _run(self) -> None:
        by_hand = self._manners["by_hand"] > self.dice.random()
        quick = not by_hand and self._manners["quick"] > self.dice.random()
        handler: Any = None if by_hand else self._handle_at_once if quick else self._any_handler()
        while True:
            consumer = Consumer(
                self._meta,
                subject=SUBJECT,
                group=self.group,
                handler=handler,
                name=self.name,
                settings=self._settings,
                network=_Listening(self.internet, self.process, self._record),
                clock=self.machine,
                dice=self.dice,
                _identity=self._identity,
            )
            try:
                await consumer.__aenter__()
                break
            except KeylaneError:
                await asyncio.sleep(0.3)
        self.consumer = consumer
        if by_hand:
            self.spawn(self._iterate(consumer), self.process.context.copy())
        await consumer.wait()

    def _any_handler(self) -> Any:
        """The handler as users write it: itself, or behind something that gives its coroutine, or a task of it, back."""
        as_given = (
            self._handle,
            lambda message: self._handle(message),  # noqa: PLW0108 - what users write
            lambda message: asyncio.ensure_future(self._handle(message)),
        )
        return as_given[int(len(as_given) * self._bodies.random())]

    def _started(self, message: Message, *, ours: bool = False) -> None:
        clock_ns = self.machine.boot_ns()
        event = started(
            message, group=self.group, clock_ns=clock_ns, ours=ours, left_ms=self._left_ms
        )
        self._record(event)

    def _ended(self, message: Message) -> None:
        self._record(ended(message, group=self.group))

    def _stumble(self) -> None:
        if not self.calm and self.dice.random() < self._manners["fails"]:
            raise RuntimeError("the handler failed, as handlers do")

    def _handle_at_once(self, message: Message) -> None:
        self._started(message)
        self._stumble()
        self._ended(message)

    async def _handle(self, message: Message) -> None:
        self._started(message, ours=True)
        dice = self.dice
        self.inside += 1
        try:
            if self._bad_keys and not self.calm and sum(message.order_key) % 2:
                await asyncio.sleep(0.001)
                raise RuntimeError("this key fails")
            if not self.calm and dice.random() < self._manners["slow"]:
                await asyncio.sleep(2 * dice.random() * self._settings.ttl_ms / 1000)
            elif dice.random() < 0.5:
                await asyncio.sleep(0.02 * dice.random())
            self._stumble()
        except (Exception, asyncio.CancelledError):
            self._record(dropped(message))
            raise
        finally:
            self.inside -= 1
        self._ended(message)

    def is_idle_beside_work(self) -> bool:
        """Messages have come that no worker has looked at, and not every worker is in a handler."""
        consumer = self.consumer
        if consumer is None or not self.running or self.process.paused:
            return False
        workers = consumer._dispatch
        if not isinstance(workers, Workers) or not workers._lanes.arrived:
            return False
        return self.inside < self._settings.concurrency

    async def _iterate(self, consumer: Consumer) -> None:
        async for message in consumer:
            self._in_hand = message
            self._started(message, ours=True)
            if not self.calm and self._bodies.random() < self._manners["slow"]:
                await asyncio.sleep(2 * self._bodies.random() * self._settings.ttl_ms / 1000)
            elif self.dice.random() < 0.3:
                await asyncio.sleep(0.01 * self.dice.random())
            self._ended(message)
            self._in_hand = None
            try:
                await message.ack()
            except KeylaneError:
                continue


class _Listening(SimNetwork):
    """Notes what a consumer tells the metaserver of its leases, at the moment of telling."""

    def __init__(self, internet: Any, process: Any, record: Record) -> None:
        super().__init__(internet, process)
        self._note = record
        self._telling = Telling()

    async def control(self, method: str, address: str, path: str, *args: Any, **kwargs: Any) -> Any:
        for event in self._telling.events(path, kwargs.get("body")):
            self._note(event)
        return await super().control(method, address, path, *args, **kwargs)
