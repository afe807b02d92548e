"""In some seeds a broker dies around the creation of a second subject, and stays away until that is
open on the other one.

It draws from a generator of its own. A creation that waits for the dead broker is a starvation:
nothing else of the seed can end before it.
"""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING

from keylane.protocol import endpoints
from keylane.protocol.control import CreateSubject
from keylane.protocol.errors import ConflictError, KeylaneError
from keylane.protocol.operations import Cordon
from keylane.protocol.routing import Route, route_table
from keylane.rpc.client import MetaClient
from sim.actors.hosts import BrokerHost

if TYPE_CHECKING:
    from sim.world import World

SECOND = "second"
"""The name of the subject."""


def is_creating(seed: int) -> bool:
    """Whether a second subject is created in a seed."""
    return seed % 16 == 14


class Creator:
    """Creates the subject, and asks again until it is open."""

    def __init__(self, world: World, meta: MetaClient) -> None:
        self._world = world
        self._meta = meta
        self._rng = random.Random(f"creations {world.seed}")
        self.idle = True
        """No action that it began is under way."""

    async def work(self) -> None:
        """Kill the broker and create the subject, in a random order."""
        world, rng = self._world, self._rng
        await asyncio.sleep(world.swarm.fault_s * 0.7 * rng.random())
        self.idle = False
        broker = rng.choice(world.brokers)
        before = rng.random() < 0.5
        if before:
            self._kill(broker)
        else:
            world.loop.after(0.3 * rng.random() ** 2, self._kill, broker)
        route = await self._create(broker)
        world.trace(f"second subject open: {route!r}")
        there = [
            partition.partition_id
            for partition in route.open_partitions()
            if partition.broker_group == broker.group
        ]
        if before and there:
            world.loop.faults.append(
                f"partitions {there} are open on a broker that was dead before"
            )
        route_table(route)  # raises where a logical partition has none
        while not broker.gone:
            await asyncio.sleep(0.1)
        broker.gone = False
        world.faults.restart(broker)
        self.idle = True

    def _kill(self, broker: BrokerHost) -> None:
        self._world.faults.done += 1
        self._world.trace(f"{broker.name} dies in a creation")
        if broker.running:
            broker.end(machine_down=self._rng.random() < 0.5)
        broker.gone = True

    async def _create(self, dead: BrokerHost) -> Route:
        ask = CreateSubject(subject=SECOND, partitions=self._rng.choice((1, 2, 4)))
        while True:
            try:
                for other in self._world.brokers:  # it may have been evacuated before
                    if other is not dead:
                        await self._meta.call(
                            endpoints.CORDON, Cordon(cordoned=False), group=other.group
                        )
                await self._meta.create_subject(ask)
                return await self._meta.route(SECOND)
            except ConflictError:
                raise
            except KeylaneError as error:
                self._world.trace(f"not created: {error!r}")
                await asyncio.sleep(0.3)
