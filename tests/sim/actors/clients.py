"""Simulated producers: the product's own, with a workload and a record of their results."""

from __future__ import annotations

import asyncio
import copy
import math
import random
from collections.abc import Callable
from typing import Any

from keylane.checker.events import Event, Routed, Sent, Settled
from keylane.producer.client import Producer
from keylane.producer.send_future import SendFuture
from keylane.producer.sender import SubjectSender
from keylane.producer.settings import ProducerSettings
from keylane.protocol.errors import (
    ClosedError,
    DeliveryError,
    DeliveryTimeoutError,
    Fate,
    KeyHaltedError,
    KeylaneError,
    ProducerFencedError,
    QueueFullError,
    Reason,
)
from keylane.protocol.ids import Subject
from keylane.protocol.message import Receipt
from keylane.protocol.routing import Partition, Route
from keylane.rpc.environment import Environment
from keylane.testing.machines.loop import Process
from keylane.testing.machines.network import SimNetwork
from sim.actors.elsewhere import Calls, Visitor, calls_of_producer
from sim.actors.hosts import BrokerHost, Host
from sim.actors.users import Identities, Preloaded, cancelled
from sim.machines.promises import is_sealed

Record = Callable[[Event], None]
SUBJECT = "orders"
TWINS_ID = 1 << 60


class ProducerHost(Host):
    """Sends bursts of messages over a few keys until it is told to stop."""

    subject = SUBJECT
    gives_up: tuple[type[KeylaneError], ...] = (DeliveryTimeoutError, KeyHaltedError)
    """Errors of messages that need not be stored, because a user asked for that."""
    keyed_share = 0.97
    """Of the messages, those that have a key; set by the world."""

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
        twins: bool,
        habits: frozenset[str],
        preloaded: Preloaded,
    ) -> None:
        super().__init__(*args)
        self._twins = twins
        self._pace = pace
        self._padding_bytes = padding_bytes
        self._record = record
        self._meta = meta
        self._keys = keys
        self._settings = settings
        self._strict = strict
        self._brokers = brokers
        self._habits = habits
        self._preloaded = preloaded
        self._rng = random.Random(f"{self.name} {self.rng.getstate()[1][:2]}")
        """For what users do, so that the rest is as it is without them."""
        self._ids = random.Random(self._rng.getrandbits(64))
        self.waiting: dict[bytes, None] = {}
        """Messages sent whose fate is not known yet."""
        self._untold: dict[bytes, SendFuture] = {}
        """Those of them whose future is not awaited."""
        self.busy = False
        """True until `count` messages are sent."""
        self._producer: Producer | None = None
        self._closing = False
        """Closing gives up the messages that were not sent."""
        self._flushing = False
        self._openings = 0
        self._number = 0
        """Of the next message of this process."""
        self._route: Route | None = None
        self._watched: SubjectSender | None = None
        self._sent_at: dict[bytes, float] = {}
        self._leave_after_s = settings["leave_after_ms"] / 1000 * 0.9
        """What a message waits at least before any leaves its partition, by a clock that drifts."""
        self._long_wait = math.inf
        """When the first message was sent that waited as long as that."""
        self._last: SendFuture | None = None
        self._abroad = random.Random(f"elsewhere {self.name} {self.rng.getstate()[1][:2]}")
        """For what another thread asks of the producer."""
        self.on_lost: Callable[[DeliveryError, Process, float], None] | None = None
        """Told when a message was sent that may be lost, if a disk may be."""
        self.on_receipt: Callable[[bytes, Receipt], None] | None = None
        """Told of each receipt."""
        self._limits = copy.copy(self.rng)
        """How long messages may take."""
        self._limited = 0.05 if self._limits.random() < 0.3 else 0.0

    def start(self, count: int) -> None:
        process = self.new_process()
        self._closing = self._flushing = False
        self._openings = 0
        self._sent_at.clear()
        self._long_wait = math.inf
        self.busy = True
        self._last = None
        self.spawn(self._run(count), process.context.copy())
        if "loops" in self._habits:
            Visitor(self, self._calls_elsewhere)

    def end(self, *, machine_down: bool) -> None:
        super().end(machine_down=machine_down)
        for value in self.waiting:
            self._record(Settled(value, "gone"))
        self.waiting.clear()
        self._untold.clear()
        self.busy = False
        self._producer = None

    def _calls_elsewhere(self) -> Calls:
        if self._producer is None:
            return {}
        key = self._abroad.choice(self._keys)
        return calls_of_producer(self._producer, self.subject, key, self._last, self._abroad)

    def close(self) -> None:
        """Close the producer at once; unsent messages are given up."""
        if self.running and not self._closing and self._producer is not None:
            work = self._close(self._producer)
            self._closing = True
            self._spawn_here(work)

    def _spawn_here(self, work: Any) -> None:
        self.process.context.copy().run(self.spawn, work, self.process.context.copy())

    async def _close(self, producer: Producer) -> None:
        if "cancel" in self._habits and self._rng.random() < 0.5:
            await cancelled(lambda: producer.close(flush=False), self._rng)
        await producer.close(flush=False)
        await self._ask_futures(producer)
        while self.waiting:  # each is told before this process ends
            await asyncio.sleep(0.001)
        self.end(machine_down=False)

    # ── opening ───────────────────────────────────────────────────────────────────────────────────
    def _make(self, network: SimNetwork, clock: Any, identities: Identities) -> Producer:
        rng = self.rng
        if "seeded" in self._habits:
            rng = random.Random(7)
        elif "forked" in self._habits:
            rng = random.Random(self._rng.getrandbits(64))
        return Producer(
            self._meta,
            settings=ProducerSettings(**self._settings),
            _environment=Environment(
                network=network, clock=clock, rng=rng, draw_identity=identities
            ),
        )

    async def _open(self, producer: Producer) -> None:
        """What the metaserver's health call needs is a metaserver: ask until one answers."""
        while True:
            if "cancel" in self._habits and self._rng.random() < 0.5:
                if await cancelled(producer.__aenter__, self._rng):
                    break
                continue
            try:
                await producer.__aenter__()
                break
            except KeylaneError:
                await asyncio.sleep(0.2)
        self._openings += 1
        self._route = self._watched = None
        self._closing = False
        self._producer = producer

    async def _reopen(self, producer: Producer) -> None:
        """Close and open the same object; each message that a clean close does not tell as lost is
        stored.
        """
        flush = self._rng.random() < 0.7
        self._producer, self._closing = None, True
        before = list(self._untold)
        if "cancel" in self._habits and self._rng.random() < 0.3:
            await cancelled(lambda: producer.close(flush=flush), self._rng)
            flush = False  # a cancelled close promises nothing
        try:
            await producer.close(flush=flush)
        except KeylaneError:
            flush = False
        self._settle_flushed(before if flush and not self._flushing else [])
        await self._ask_futures(producer)
        while self.waiting:
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.5 * self._rng.random())
        await self._open(producer)

    async def _run(self, count: int) -> None:
        network = SimNetwork(self.internet, self.process)
        # Of twins the first id is the same, as after the copy of a whole machine.
        identities = Identities(self._ids, [TWINS_ID] if self._twins else [])
        parts = (network, self.machine, identities)
        if "forked" in self._habits:
            producer = self._preloaded.copy("producer", self._make, parts)
        else:
            producer = self._make(*parts)
        await self._open(producer)
        self._number = 0
        if "tasks" in self._habits:
            self.spawn(self._send_more(producer, count), self.process.context.copy())
        await self._send_all(producer, count)
        await self._flush_until_told(producer)
        self.busy = False

    async def _send_all(self, producer: Producer, count: int) -> None:
        rng = self.rng
        while self._number < count and not (self._closing and self._producer is not None):
            left = count - self._number
            await self._send(producer, min(left, rng.choice((1, 1, 2, 5, 20))))
            pause_s = rng.choice((0, 0.01, 0.1, 0.5, 1.0)) * rng.random()
            await asyncio.sleep(self._pace * pause_s)
            if self._habits and not self._closing:
                await self._follow_habits(producer)

    async def _send_more(self, producer: Producer, count: int) -> None:
        """Send from a second task, with the same keys."""
        while self._number < count:
            if self._producer is not None and not self._closing:
                await self._send(producer, 1)
            elif self._producer is not None:
                return
            await asyncio.sleep(self._pace * 0.3 * self._rng.random())

    async def _follow_habits(self, producer: Producer) -> None:
        rng = self._rng
        if "flush" in self._habits and rng.random() < 0.2:
            await self._flush(producer)
        if "cancel" in self._habits and rng.random() < 0.2:
            await cancelled(producer.drain, rng)
        if "reopen" in self._habits and rng.random() < 0.15 and self._producer is producer:
            await self._reopen(producer)

    # ── flush ─────────────────────────────────────────────────────────────────────────────────────
    async def _flush(self, producer: Producer) -> None:
        """Flush once; what was sent before is stored if no error comes."""
        if self._flushing:  # of two flushes one is told what failed
            await asyncio.sleep(0.1)
            return
        self._flushing = True
        try:
            await self._flush_alone(producer)
        finally:
            self._flushing = False

    async def _flush_alone(self, producer: Producer) -> None:
        before = list(self._untold)
        if "cancel" in self._habits and self._rng.random() < 0.3:
            if not await cancelled(producer.flush, self._rng):  # it may have told an error
                await self._ask_futures(producer)
            return
        try:
            await producer.flush()
        except KeylaneError:  # of which messages, their futures say
            await self._ask_futures(producer)
        else:
            self._settle_flushed(before)

    async def _flush_until_told(self, producer: Producer) -> None:
        while self._untold and self._producer is producer and not self._closing:
            await self._flush(producer)

    def _settle_flushed(self, values: list[bytes]) -> None:
        for value in values:
            if self._untold.pop(value, None) is not None:
                self._record(Settled(value, "flushed"))
                self._note_wait(value)
                del self.waiting[value]

    async def _ask_futures(self, producer: Producer, values: list[bytes] | None = None) -> None:
        """After a failed flush, or without one, each future tells what became of its message."""
        for value in list(self._untold) if values is None else values:
            future = self._untold.pop(value, None)
            if future is not None:
                work = self._settle(producer, future, value)
                self.spawn(work, self.process.context.copy())

    # ── sending ───────────────────────────────────────────────────────────────────────────────────
    def burst(self) -> None:
        """Send some more messages now."""
        if self.running and not self._closing and self._producer is not None:
            self._spawn_here(self._burst(self._producer))

    async def _burst(self, producer: Producer) -> None:
        await self._send(producer, 6)
        if not self.busy:
            await self._flush_until_told(producer)

    async def _send(self, producer: Producer, count: int) -> None:
        name, rng = f"{self.name}.{self.starts}", self.rng
        if self._openings > 1:
            name += f".{self._openings}"
        opening = self._openings
        for _ in range(count):
            key = rng.choice(self._keys) if rng.random() < self.keyed_share else b""
            value = b"%s:%d" % (name.encode(), self._number)
            value += b"." * int(self._padding_bytes * rng.random() ** 3)
            if self._closing or self._openings != opening:
                return
            try:
                future = producer.send(self.subject, value, key=key, timeout_ms=self._time_limit())
                self._watch_routes(producer, name)
            except QueueFullError:
                await producer.drain()
                continue
            except KeyHaltedError:
                await asyncio.sleep(0.1)
                continue
            except ClosedError:
                assert "reopen" in self._habits, "closed although no habit of this user closes it"
                return
            self._record(Sent(value, key, name, self._number, self._strict))
            self._last = future
            self.waiting[value] = None
            self._sent_at[value] = self.loop.now
            if "flush" in self._habits and self._rng.random() < 0.5:
                self._untold[value] = future
            else:
                work = self._settle(producer, future, value)
                self.spawn(work, self.process.context.copy())
            self._number += 1

    def _watch_routes(self, producer: Producer, name: str) -> None:
        """Note each route at the moment in which it is followed, when that is another one."""
        sender = producer._senders[Subject(self.subject)]
        if sender is self._watched:
            return
        self._watched = sender
        refill = sender._reassign_messages

        def note() -> None:
            route = sender._route
            if route is not None and route is not self._route:
                self._route = route
                partitions = route.open_partitions()
                ids = sorted(partition.partition_id for partition in partitions)
                self._record(Routed(name, route.version, tuple(ids)))
                if self._strict:
                    self._check_sealed(partitions)

        def refilled() -> None:
            note()
            refill()

        sender._reassign_messages = refilled  # type: ignore[method-assign]
        note()

    def _check_sealed(self, partitions: tuple[Partition, ...]) -> None:
        """Every parent of a partition is sealed before a producer is told of the partition, unless
        the parent was given up.
        """
        for partition in partitions:
            for parent in partition.parents:
                if is_sealed(self._brokers, parent) is False:
                    said = (
                        f"partition {partition.partition_id} was opened before {parent} was sealed"
                    )
                    self.loop.faults.append(said)

    def _time_limit(self) -> int | None:
        if not self._limited or self._limits.random() >= self._limited:
            return None
        return self._limits.choice((200, 1_000, 3_000))

    async def _settle(self, producer: Producer, future: SendFuture, value: bytes) -> None:
        if "cancel" in self._habits and self._rng.random() < 0.2:
            await cancelled(lambda: _receipt(future), self._rng)
        try:
            receipt = await future
        except KeylaneError as error:
            asked = isinstance(error, self.gives_up)
            # A twin under one id may fence messages that have no answer yet: their fate stays
            # unknown, and the error says so.
            asked = asked or (self._twins and isinstance(error, ProducerFencedError))
            told = ("withdrawn", "gone") if self._closing or asked else ("not done", "unknown")
            outcome = told[error.fate is not Fate.NOT_DONE]
            if error.reason is Reason.ACCEPTED_AS_LOST and self.on_lost is not None:
                self.on_lost(error, self.process, self._sent_at[value])
                outcome = "gone"
            self._record(Settled(value, outcome))
            if isinstance(error, DeliveryTimeoutError):
                await asyncio.sleep(0.05)
                producer.resume(error)
        else:
            if self.on_receipt is not None:
                self.on_receipt(value, receipt)
            place, twice = (receipt.partition_id, receipt.offset), receipt.duplicate == "possible"
            self._record(Settled(value, "stored", *place, receipt.reordered, twice))
            if receipt.reordered:
                self._check_patience(value)
        self._note_wait(value)
        del self.waiting[value]

    def _note_wait(self, value: bytes) -> None:
        if self.loop.now - self._sent_at[value] >= self._leave_after_s:
            self._long_wait = min(self._long_wait, self._sent_at[value])

    def _check_patience(self, value: bytes) -> None:
        """A message leaves its partition only when a message that is not newer has waited for that
        partition long enough.
        """
        sent_at, now = self._sent_at[value], self.loop.now
        waits = any(
            self._sent_at[other] <= min(sent_at, now - self._leave_after_s)
            for other in self.waiting
        )
        if not waits and self._long_wait > sent_at:
            self.loop.faults.append(f"{value!r} is reordered, though nothing waited for long")


async def _receipt(future: SendFuture) -> Any:
    return await future
