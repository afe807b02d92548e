"""Two programs with one outbox are frozen in turn: the first wakes up when the second, which took
over, is in its work.

What the second has recorded waits for it, and the first has newer rows of the same keys at hand.
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace

from sim.actors.outboxes import Outboxes, UserHost
from sim.features.feature import Feature
from sim.swarm import Swarm

TAKES_OVER_S = 5.0
"""The longest lease, and a round."""


class RelayedOutboxes(Outboxes):
    """The programs, frozen in turn until the world is healed."""

    async def work(self) -> None:
        rng, world = self._rng, self._world
        while not world.faults.healed:
            await asyncio.sleep(0.2 + 0.5 * rng.random())
            first = next((host for host in self.hosts if host.running and host.sends), None)
            if first is None:
                continue
            (second,) = (host for host in self.hosts if host is not first)
            world.faults.done += 1
            world.trace(f"{first.name} is frozen before {second.name}")
            first.process.paused = True
            await self._until_it_works(second)
            second.process.paused = True
            world.loop.resume(first.process)
            await asyncio.sleep(0.1 + 0.3 * rng.random())
            world.loop.resume(second.process)

    async def _until_it_works(self, host: UserHost) -> None:
        until_s = self._world.loop.now + TAKES_OVER_S
        while self._world.loop.now < until_s and not (host.running and host.is_sending):
            await asyncio.sleep(0.001)


class Relays(Feature):
    """See the module."""

    @classmethod
    def plan(cls, swarm: Swarm, rng: random.Random) -> Swarm:
        # The brokers are well most of the time: the programs are not.
        few = frozenset(sorted(swarm.faults)[:3])
        return replace(swarm, faults=few, fault_s=8.0, gap_s=2.0, messages=10)
