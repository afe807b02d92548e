"""Messages for a later delivery, some of them canceled, while brokers die and do not hear each
other: each accepted one comes once, at its time.
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace

from keylane.broker.scheduled.agenda import PATH
from keylane.checker.events import Sent, Settled, Started
from keylane.producer.client import Producer
from keylane.producer.scheduled.sending import ScheduledFuture
from keylane.protocol.errors import (
    ClosedError,
    Fate,
    KeylaneError,
    NotFoundError,
    QueueFullError,
)
from keylane.protocol.message import Message
from keylane.protocol.scheduled.receipt import CancelOutcome, ScheduledReceipt
from sim.actors.clients import ProducerHost
from sim.actors.hosts import BrokerHost
from sim.features.feature import Feature
from sim.features.parks import expired_in
from sim.features.scheduling import SchedulingBrokerHost
from sim.swarm import Swarm

AHEAD_MS = (60, 300, 1_500, 5_000)
REPEATING_EVERY = 60
REPEATING = (17, 52)
"""Remainders of the numbers of worlds by REPEATING_EVERY where senders ask again after a broker has
delivered, cleaned and started again.
"""
CANCELS = 0.35
"""The share of messages that are canceled."""


class LaterProducer(ProducerHost):
    """Sends messages for later, and cancels some."""

    feature: LaterDeliveries

    async def _send_all(self, producer: Producer, count: int) -> None:
        rng = self.rng
        while self._number < count and not (self._closing and self._producer is not None):
            for _ in range(min(count - self._number, rng.choice((1, 1, 3, 8)))):
                if not self._closing:
                    self._send_later(producer)
            await asyncio.sleep(self._pace * rng.choice((0.0, 0.05, 0.3)) * rng.random())

    def burst(self) -> None:
        """Only messages for later are sent."""

    def _send_later(self, producer: Producer) -> None:
        rng = self.rng
        name = f"{self.name}.{self.starts}"
        value = b"%s:%d" % (name.encode(), self._number)
        at_ms = self.machine.wall_ms() + 50 + int(rng.choice(AHEAD_MS) * rng.random())
        try:
            future = producer.send(self.subject, value, deliver_at=at_ms)
        except (QueueFullError, ClosedError):
            return
        assert isinstance(future, ScheduledFuture)
        self._record(Sent(value, b"", name, self._number, strict=True))
        self._number += 1
        self.waiting[value] = None
        self.feature.due_ms[value] = at_ms
        self.spawn(self._settle_later(producer, future, value), self.process.context.copy())

    async def _settle_later(
        self, producer: Producer, future: ScheduledFuture, value: bytes
    ) -> None:
        try:
            receipt = await future
        except KeylaneError as error:
            refused = error.fate is Fate.NOT_DONE
            self.feature.fates[value] = "withdrawn" if refused else "gone"
        else:
            self.feature.fates[value] = "flushed"
            self.feature.ids[value] = receipt.scheduled_id
            if self.rng.random() < CANCELS:
                await asyncio.sleep(4.0 * self.rng.random() ** 3)
                await self._cancel(producer, receipt, value)
        self.waiting.pop(value, None)

    async def _cancel(self, producer: Producer, receipt: ScheduledReceipt, value: bytes) -> None:
        """Cancel until there is an answer, at times once more: the first answer holds for ever."""
        fates = self.feature.fates
        told = await self._canceled(producer, receipt, value)
        if told and self.rng.random() < 0.3:
            await asyncio.sleep(self.rng.random())
            again = await self._canceled(producer, receipt, value)
            if again not in {"", "gone", told}:
                self.loop.faults.append(f"{value!r} was {told}, and is {again}")
            fates[value] = told

    async def _canceled(self, producer: Producer, receipt: ScheduledReceipt, value: bytes) -> str:
        """
        The outcome of a cancel, which `fates` has too; "" if the producer was closed meanwhile.

        A broker that does not know an accepted message any more has delivered it, or has canceled
        it when it was asked before; it forgets what is settled.
        """
        fates, asked = self.feature.fates, False
        while True:
            before, fates[value] = fates[value], "gone"
            try:
                outcome = await producer.cancel(receipt)
                told = "flushed" if outcome is CancelOutcome.DELIVERED else "withdrawn"
            except ClosedError:
                return ""
            except NotFoundError:
                told = "gone" if asked else before
            except KeylaneError as error:
                asked = asked or error.fate is not Fate.NOT_DONE
                fates[value] = "gone" if asked else before
                await asyncio.sleep(0.2)
                continue
            fates[value] = told
            return told

    def end(self, *, machine_down: bool) -> None:
        unknown = list(self.waiting)
        self.waiting.clear()
        super().end(machine_down=machine_down)
        for value in unknown:  # neither accepted for sure, nor canceled
            self.feature.fates.setdefault(value, "gone")


class LaterDeliveries(Feature):
    """See the module."""

    faults = frozenset({"broker_crash", "broker_commit", "broker_power"})
    # The calendars are right: what is not due by one of them is not due.
    never = frozenset({"wall_jump", "drift"})

    @classmethod
    def plan(cls, swarm: Swarm, rng: random.Random) -> Swarm:
        # In most worlds brokers remove what is old of their logs, and write again what waits.
        few = {"segment_bytes": 4_096, "retention_bytes": rng.choice((1, 8_192))}
        broker = swarm.broker | (few if rng.random() < 0.7 else {})
        return replace(swarm, fault_s=8.0, partitions=rng.choice((1, 2)), broker=broker)

    def build(self) -> None:
        self.due_ms: dict[bytes, int] = {}
        self.fates: dict[bytes, str] = {}
        """What the sender knows of each message, as an outcome of `Settled`."""
        self.ids: dict[bytes, str] = {}
        """By accepted message, its id."""
        for number in range(2):
            host = self.add_producer(LaterProducer, f"l{number}")
            assert isinstance(host, LaterProducer)
            host.feature = self
        for consumer in self.world.consumers:
            consumer.on_message = self.on_message
        self._repeating = self.world.number % REPEATING_EVERY in REPEATING

    def on_message(self, message: Message) -> None:
        due_ms = self.due_ms.get(message.value)
        now_ms = self.world.machines[0].wall_ms()
        if due_ms is not None and now_ms < due_ms:
            self.problems.append(f"{message.value!r} comes {due_ms - now_ms} ms too early")

    async def work(self) -> None:
        """Have brokers not hear what others answer, in half of the worlds: a delivery is stored
        elsewhere, and nothing says so.
        """
        while self._repeating and not self.world.faults.healed:
            await self.pause(1.0)
            await self._answer_no_sender()
        if self.rng.random() < 0.5:
            return
        while not self.world.faults.healed:
            await self.pause(0.6)
            if self._are_removing and self.rng.random() < 0.2:
                self._start_without_copies(self.rng.choice(self.world.brokers))
            else:
                self._lose_answers()

    @property
    def _are_removing(self) -> bool:
        """Whether brokers remove what is old of their logs."""
        return any("retention_bytes" in broker._settings for broker in self.world.brokers)

    def _start_without_copies(self, broker: BrokerHost) -> None:
        """Start a broker again that has lost its snapshots and the copy of its scheduled messages:
        the log alone has all that is needed.
        """
        if not broker.running:
            return
        broker.end(machine_down=False)
        _lose_copies(broker)
        self.world.faults.restart(broker)
        self.world.faults.done += 1

    def _lose_answers(self) -> None:
        """Hold what one broker answers another for a moment, then break their connection off."""
        world, internet = self.world, self.world.internet
        names = {broker.name for broker in world.brokers}
        pairs = sorted(
            (connection.client.name, connection.server.process.name)
            for connection in internet.connections
            if not connection.broken
            and {connection.client.name, connection.server.process.name} <= names
        )
        if pairs:
            client, server = self.rng.choice(pairs)
            internet.cut_link(server, client)
            world.loop.after(0.6 * self.rng.random(), internet.break_link, server, client)
            world.faults.done += 1

    async def _answer_no_sender(self) -> None:
        """Hold what a broker answers senders until it has delivered, and was started again; they
        ask again.
        """
        world = self.world
        broker = self.rng.choice(world.brokers)
        links = [
            (broker.name, host.name) for host in world.producers if isinstance(host, LaterProducer)
        ]
        for link in links:
            world.internet.cut_link(*link)
        await asyncio.sleep(0.3 + self.rng.random())
        if broker.running and not world.faults.healed:
            broker.end(machine_down=False)
            _lose_copies(broker)
        await self.pause(0.3)
        for link in links:
            world.internet.heal_link(*link)
        world.faults.restart(broker)
        world.faults.done += 1

    @property
    def drained(self) -> bool:
        brokers = self.world.brokers
        return not any(isinstance(each, SchedulingBrokerHost) and each.keeps for each in brokers)

    def settle(self) -> None:
        """A broker that has not noted the answer of a partition, and finds it expired, delivers
        again.
        """
        expired = expired_in(self.world)
        handled_there = {
            event.value
            for event in self.world.history
            if isinstance(event, Started) and event.partition_id in expired
        }
        for value, fate in self.fates.items():
            is_noted_once = self._noted(self.ids.get(value, "")) < 2
            twice = value in handled_there and is_noted_once
            self.world.record(Settled(value, fate, twice=twice))

    def _noted(self, scheduled_id: str) -> int:
        """How often brokers have noted durably that a message is delivered."""
        hosts = [each for each in self.world.brokers if isinstance(each, SchedulingBrokerHost)]
        return sum(host.delivered[scheduled_id] for host in hosts)


def _lose_copies(broker: BrokerHost) -> None:
    for name in broker.disk.list("snapshot"):
        broker.disk.remove(f"snapshot/{name}")
    if broker.disk.size(PATH) is not None:
        broker.disk.remove(PATH)
