"""What the actors of a feature are to the world: programs beside the usual ones, deeds, and a judge
of their own.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from keylane.broker.partition.partition import HostedPartition
from keylane.checker.findings import Findings
from keylane.protocol.control import Retention
from keylane.protocol.message import Message
from sim.actors.clients import ProducerHost
from sim.actors.consumers import ConsumerHost
from sim.service import Service
from sim.swarm import Swarm

if TYPE_CHECKING:
    from sim.features.world import FeatureWorld


class Feature:
    """A feature at work in a world; it draws from a generator of its own."""

    faults: frozenset[str] = frozenset()
    """Struck in every seed."""
    never: frozenset[str] = frozenset()
    """Struck in none."""
    creates = False
    """Subjects are created that have to be there in the end."""
    consumer_kind: type[ConsumerHost] = ConsumerHost
    retention = Retention.ACKED
    """Of the usual subject."""
    may_have_copies = True
    """Brokers' folders may have copies; False where disks are damaged, lost or copied otherwise."""
    drain_s = 0.0
    """What it needs longer than the usual programs, once all is healed; see `World.drain_s`."""
    history_speed = 0
    """How much faster time passes for what is over, so that metaservers forget it within a run; 0:
    they do not.
    """
    known_s = float("inf")
    """For so long metaservers know what is over, at least."""

    def __init__(self, world: FeatureWorld) -> None:
        self.world = world
        self.rng = random.Random(f"{type(self).__name__} {world.number}")
        self.idle = True
        """No action that it began is under way."""
        self.problems: list[str] = []

    @classmethod
    def plan(cls, swarm: Swarm, rng: random.Random) -> Swarm:
        """The world's plan, changed for the feature."""
        return swarm

    def build(self) -> None:
        """Add programs to the world."""

    def lost(self, partitions: Iterable[HostedPartition]) -> None:
        """Look at what was on a disk that is lost now."""

    def on_message(self, message: Message) -> None:
        """Look at a message of the usual subject that a handler begins with."""

    def adopt(self, consumer: ConsumerHost) -> None:
        """Make a consumer of the usual group its own."""
        consumer.on_message = self.on_message

    def seen(self, view: list[Any]) -> list[Any]:
        """The view of the usual subject, as the usual judge is to see it."""
        return view

    def services(self) -> list[Service]:
        """The consumer groups of further subjects."""
        return []

    @property
    def drained(self) -> bool:
        """Whether nothing of it is left to do, once all is healed."""
        return True

    async def work(self) -> None:
        """Do deeds until the world is healed."""

    async def look(self) -> None:
        """Ask metaservers for what the judge needs, after the draining. Raises KeylaneError: it is
        asked again.
        """

    def settle(self) -> None:
        """Record what became of its messages, after the draining."""

    def check(self, findings: Findings, hosted: dict[int, HostedPartition]) -> None:
        """Judge what is the feature's own; `hosted` is what the brokers' disks have at the end."""

    def add_producer(self, kind: type[ProducerHost], name: str, **more: Any) -> ProducerHost:
        """Add a producer that faults strike as they do others."""
        world, swarm = self.world, self.world.swarm
        host = kind(
            world.internet,
            world._machine(name),
            name,
            random.Random(self.rng.getrandbits(64)),
            record=world.record,
            meta=world._meta,
            keys=[b"%s-%d" % (name[:1].encode(), number) for number in range(swarm.keys)],
            settings=swarm.producer,
            strict=True,
            brokers=world.brokers,
            padding_bytes=swarm.padding_bytes,
            pace=swarm.pace,
            twins=False,
            habits=frozenset(),
            preloaded=world.preloaded,
            **more,
        )
        world.producers.append(host)
        return host

    def may_be_forgotten(self, asked_s: float) -> bool:
        """Whether what was first asked for then may be over, and not be known any more: it cannot
        have ended before.
        """
        return self.world.loop.now - asked_s >= self.known_s

    async def pause(self, seconds: float) -> None:
        """Wait up to this long."""
        await asyncio.sleep(seconds * self.rng.random())
