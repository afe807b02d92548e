"""Messages that end the process that handles them: each is set aside after a few ends, and no other
message with it.

All is quiet otherwise, and there is one partition, so that what a message is accused of is exact:
the first end accuses none, the second makes suspects of all that was pulled, the third accuses the
one that was begun alone.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from dataclasses import replace
from typing import Any

from keylane.checker.events import Sent, Stored
from keylane.consumer.session.state import CRASHES_MAX
from keylane.protocol.message import Message
from keylane.testing.machines.disk import Crashed
from sim.actors.clients import SUBJECT
from sim.actors.consumers import ConsumerHost
from sim.features.feature import Feature
from sim.features.parks import ParkedKeys, parked_on
from sim.lateness import outlast_reasons
from sim.swarm import Swarm

MESSAGES = 12
"""Of the quiet end, among them those that kill."""
ENDS_MAX = CRASHES_MAX + 1
"""Of one message: one that accuses none, one that makes suspects, and one more."""
AGAIN_S = 0.3
"""Between the end of a process and its next start."""


class KilledHost(ConsumerHost):
    """A consumer whose process ends at some messages."""

    killers: Killers | None = None

    def _check_poison(self, message: Message) -> None:
        killers = self.killers
        if killers is not None and killers.kills(message):
            killers.ends[message.value] += 1
            self.end(machine_down=False)
            self.loop.after(AGAIN_S, killers.world.faults.restart, self)
            raise Crashed(f"{message.value!r} ends the process")


class Killers(Feature):
    """See the module."""

    never = frozenset({"resize", "split", "merge", "move", "evacuate", "cordon"})
    consumer_kind = KilledHost

    @classmethod
    def plan(cls, swarm: Swarm, rng: random.Random) -> Swarm:
        policy = {
            "on_failure": rng.choice(("park", "dead")),
            "tries_max": rng.choice((1, 2, 10)),
            "buffer_messages": 10_000,
            "pull_bytes": 1 << 20,
        }
        return replace(
            swarm,
            keys=rng.choice((2, 3, 6)),
            messages=10,
            partitions=1,
            ttl_ms=1_000,
            disk_s=0.004,
            consumers=rng.choice((1, 2)),
            consumer=swarm.consumer | policy,
            manners=swarm.manners | {"slow": 0.0, "fails": 0.0, "bad_keys": 0.0, "by_hand": 0.0},
        )

    def build(self) -> None:
        self.ends: Counter[bytes] = Counter()
        self._numbers = frozenset(self.rng.sample(range(MESSAGES), self.rng.choice((1, 1, 2))))
        self._armed = self._done = False
        self._prefix = b""
        self.keys = ParkedKeys(self)
        for consumer in self.world.consumers:
            self.adopt(consumer)

    def adopt(self, consumer: ConsumerHost) -> None:
        assert isinstance(consumer, KilledHost)
        consumer.killers = self
        super().adopt(consumer)

    def kills(self, message: Message) -> bool:
        """Whether this message ends the process that handles it."""
        if not self._armed or not message.value.startswith(self._prefix):
            return False
        return number_of(message.value) in self._numbers

    async def work(self) -> None:
        """Once all is healed and handled, send what kills, and look at what becomes of it; then
        redrive it, and it kills no more.
        """
        world = self.world
        (producer,) = (each for each in world.producers if each.subject == SUBJECT)
        while not world.faults.healed or producer.busy or producer.waiting:
            await asyncio.sleep(0.2)
        await asyncio.sleep(world.service.limit_s)
        while not world.service.drained:
            await asyncio.sleep(0.2)
        producer.end(machine_down=False)
        self._armed = True
        self._prefix = b"%s.%d" % (producer.name.encode(), producer.starts + 1)
        producer.start(MESSAGES)
        while producer.busy or producer.waiting or not world.service.drained:
            await asyncio.sleep(0.2)
        await outlast_reasons(world.consumers, dict)
        self._judge()
        self._armed = False
        self._done = True
        while True:
            await self.keys.change_some(chance=1.0)
            await asyncio.sleep(0.5)

    def _judge(self) -> None:
        for value, ends in self.ends.items():
            if ends > ENDS_MAX + len(self._numbers) - 1:
                self.problems.append(f"{value!r} ended {ends} processes; {ENDS_MAX} are allowed")
        killing = {self._keys_by_value.get(value) for value in self.ends}
        parked = [
            key
            for broker in self.world.brokers
            if broker.store is not None
            for each in parked_on(broker.store).values()
            for key, known in each.items()
            if known.messages
        ]
        for key in parked:
            if isinstance(key, bytes) and key and key not in killing:
                self.problems.append(f"{key!r} is set aside, and no message of it ends processes")
        if not parked:
            self.problems.append("nothing was set aside")

    @property
    def _keys_by_value(self) -> dict[bytes, bytes]:
        return {event.value: event.key for event in self.world.history if isinstance(event, Sent)}

    def seen(self, view: list[Any]) -> list[Any]:
        """Without keys where each dead letter is alone: later messages of its key go on before that
        is durable.
        """
        if self.world.swarm.consumer["on_failure"] == "park":
            return view
        return [
            event._replace(key=b"") if isinstance(event, Sent | Stored) else event for event in view
        ]

    @property
    def drained(self) -> bool:
        return self._done and self.keys.none_left


def number_of(value: bytes) -> int:
    """The number of a message, as its producer has put it into the value."""
    return int(value.split(b":")[1].rstrip(b"."))
