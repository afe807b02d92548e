"""In some seeds all metaservers are away for several ttls, while brokers and consumers go on.

It draws from a generator of its own. In half of these seeds there is no other fault: then every
consumer must keep its partitions, under the same tokens, while the metaservers are away and when
they are back, even if the brokers that have copies are killed at that moment, and copies take their
places. In the others everything is judged as always.
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace
from typing import TYPE_CHECKING

from sim.actors.copying import has_copies
from sim.swarm import Swarm

if TYPE_CHECKING:
    from sim.world import World

TAKE_OVER_S = 8.0
"""Within this time copies have the places of brokers that were killed, and owners are back."""
HEARD_S = 3.5
"""Within this time every consumer is heard by metaservers that are back."""
Held = dict[tuple[str, object], set[tuple[int, int]]]
"""Maps a consumer, and what it opened last, to its partitions with their tokens."""


def is_away(seed: int) -> bool:
    """Whether the metaservers are away in a seed."""
    return seed % 16 == 8


def is_calm(seed: int) -> bool:
    """Whether nothing else fails in such a seed."""
    return seed % 32 == 24


def for_outages(seed: int, swarm: Swarm) -> Swarm:
    """The plan of such a seed, in which no fault starts a metaserver."""
    faults = {name for name in swarm.faults if not name.startswith("meta_")}
    if is_calm(seed):
        faults &= {"drift"}
    is_copied = has_copies(seed % 10**9)
    if is_calm(seed):  # promises take syncs of disks, which are quick beside a ttl
        syncs_ms = round(15_000 * swarm.disk_s) if is_copied else 0
        swarm = replace(swarm, ttl_ms=max(2_000 + syncs_ms, swarm.ttl_ms))
    fault_s = max(swarm.fault_s, 3.0 + 10 * swarm.ttl_ms / 1000)
    if is_calm(seed) and is_copied:
        fault_s += swarm.ttl_ms / 1000 + 2 * TAKE_OVER_S
    return replace(swarm, faults=frozenset(faults), fault_s=fault_s)


class Outage:
    """Ends all metaservers, and starts them again."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._rng = random.Random(f"outage {world.seed}")
        self._ttl_s = world.swarm.ttl_ms / 1000
        self.is_quiet = is_calm(world.seed)
        """True as long as nothing else may fail."""

    async def work(self) -> None:
        """One outage."""
        world, rng = self._world, self._rng
        await asyncio.sleep(2.0 + self._ttl_s * (1 + rng.random()))
        before = self._held()
        world.faults.done += 1
        world.trace("all metaservers away")
        for host in world.metas:
            host.end(machine_down=rng.random() < 0.3)
        await asyncio.sleep(self._ttl_s * (3 + 3 * rng.random()))
        self._compare(before, "while no metaserver answers")
        for host in world.metas:
            world.faults.restart(host)
        if is_calm(world.seed):
            heard_s = rng.choice((0.0, HEARD_S))
            await asyncio.sleep(heard_s + self._ttl_s * rng.random())
            kills = world.copying.kill_brokers()
            await asyncio.sleep(2 * self._ttl_s + TAKE_OVER_S * kills)
            # Nothing has to move if nobody came or went, and promises had not to last until a copy
            # serves.
            if self._held().keys() == before.keys() and (heard_s or not kills):
                self._compare(before, "after the metaservers were away")
        self.is_quiet = False

    def _held(self) -> Held:
        held: Held = {}
        for host in self._world.consumers:
            assignments = None if host.consumer is None else host.consumer._assignments
            if host.running and not host.leaving and assignments is not None:
                held[host.name, assignments] = {
                    (client.partition_id, client.state.tenure.lease.token)
                    for client in assignments.clients
                    if client.token_is_single_use and client.state.tenure.is_acquired
                }
        return held

    def _compare(self, before: Held, when: str) -> None:
        if not is_calm(self._world.seed):
            return
        after = self._held()
        for (name, opened), leases in before.items():
            lost = leases - after.get((name, opened), leases)
            if lost:
                self._world.loop.faults.append(f"{name} lost {sorted(lost)} {when}")
