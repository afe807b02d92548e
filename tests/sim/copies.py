"""In some seeds a running broker's folder is copied, and the copy runs later in place of the newer
folder, for a while.

It draws from a generator of its own. Metaservers and networks are whole in these seeds: while no
metaserver answers, a broker cannot know that another folder stands for its group.
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace
from typing import TYPE_CHECKING

from keylane.testing.machines.disk import SimDisk
from sim.actors.folders import copy_of
from sim.actors.hosts import META_SETTINGS, BrokerHost
from sim.swarm import Swarm

if TYPE_CHECKING:
    from sim.world import World

WHOLE = ("meta_", "cut_", "one_way", "reset", "loss", "late", "twice", "ghosts", "broker_moves")
"""The names of faults that begin so are left out."""
BROKER_FAULTS = (
    "broker_flush",
    "broker_full",
    "broker_torn",
    "broker_power",
    "broker_stall",
    "broker_commit",
    "broker_pause",
)
"""These change the disk while it is copied, or keep a broker from reporting what it has written."""
REPORTED_S = 3 * META_SETTINGS.broker_heartbeat_ms / 1000
"""Seconds after which a broker has reported its last writes."""


def is_copied(seed: int) -> bool:
    """Whether folders are copied in a seed."""
    return seed % 32 == 9


def for_copies(swarm: Swarm) -> Swarm:
    """The plan of such a seed."""
    faults = {name for name in swarm.faults if not name.startswith(WHOLE + BROKER_FAULTS)}
    return replace(swarm, faults=frozenset(faults), fault_s=max(12.0, swarm.fault_s))


class Copier:
    """Copies folders and exchanges them, until the world is healed."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._rng = random.Random(f"copies {world.seed}")
        self.exchanged = 0

    async def work(self) -> None:
        """One copy after the other."""
        world, rng = self._world, self._rng
        while not world.faults.healed:
            await asyncio.sleep(2 * rng.random())
            broker = rng.choice(world.brokers)
            if not broker.running or not broker.heard or broker.store is None:
                continue
            copy, starts = copy_of(broker.disk), broker.starts
            await asyncio.sleep(0.5)
            end = (
                broker.store.log.end
            )  # with the commit that was being written, which the copy may have
            await asyncio.sleep(2 * rng.random())
            farther = broker.running and broker.store.log.end > end
            await asyncio.sleep(REPORTED_S)
            same = broker.running and broker.starts == starts and broker.heard
            if farther and same and not world.faults.healed:
                await self._exchange(broker, copy)

    async def _exchange(self, broker: BrokerHost, copy: SimDisk) -> None:
        """The copy runs where the original was, and then the original again."""
        self.exchanged += 1
        self._world.faults.done += 1
        self._world.trace(f"older copy of {broker.name}")
        broker.end(machine_down=False)
        newer, broker.disk, broker.copied = broker.disk, copy, True
        self._world.faults.restart(broker)
        await asyncio.sleep(1 + 2 * self._rng.random())
        if broker.running:
            broker.end(machine_down=False)
        broker.disk, broker.copied = newer, False
        self._world.faults.restart(broker)
