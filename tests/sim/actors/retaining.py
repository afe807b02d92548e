"""Seeds in which brokers remove old segments while groups die young, partitions move and
metaservers end in between.
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from keylane.protocol import endpoints
from keylane.protocol.control import Heartbeat, Join
from keylane.protocol.errors import KeylaneError
from keylane.rpc.client import MetaClient
from keylane.testing.machines.network import SimNetwork
from sim.actors.clients import SUBJECT
from sim.actors.consumers import ConsumerHost
from sim.swarm import Swarm

if TYPE_CHECKING:
    from sim.world import World

LOOK_S = 1.5
ALWAYS = frozenset({"V01", "V02", "V08", "V09", "V10", "V12", "V13"})
"""Checks of `meta verify` that hold at any moment, also during operations and with silent
brokers.
"""


def is_retaining(seed: int) -> bool:
    """Whether a seed is about what retention removes."""
    return seed % 8 == 3


def for_retention(seed: int, swarm: Swarm) -> Swarm:
    """The plan of such a seed: longer, with short segments, moves, and few other faults."""
    rng = random.Random(f"retention {seed}")
    faults = {name for name in swarm.faults if rng.random() < 0.5}
    some = {"move", "resize", "dead_group", "meta_told"}
    few = {"segment_bytes": 4_096, "retention_bytes": rng.choice((1, 1, 8_192))}
    return replace(
        swarm,
        faults=frozenset(faults | some),
        fault_s=max(12.0, swarm.fault_s),
        gap_s=min(1.0, swarm.gap_s),
        messages=120,
        pace=3.0,
        padding_bytes=300,
        broker=swarm.broker | few,
    )


class DeadGroupHost(ConsumerHost):
    """A consumer that is killed at its first grant, before it asks a broker; started again it is as
    any other.
    """

    _died = False

    async def _run(self) -> None:
        if self._died:
            await super()._run()
            return
        meta = MetaClient(SimNetwork(self.internet, self.process), self._meta)
        session = f"{self.rng.getrandbits(128):032x}"
        version = -1
        while not await self._granted(meta, session, version):
            await asyncio.sleep(0.2)
        self._died = True
        if self.calm:  # everything is healed: it would not be started again
            await super()._run()
            return
        self.end(machine_down=False)

    async def _granted(self, meta: MetaClient, session: str, version: int) -> bool:
        """Join and send a heartbeat; return whether the metaserver grants a partition."""
        ask: Any = Join(
            subject=SUBJECT, group=self.group, session=session, ttl_ms=self._settings.ttl_ms
        )
        try:
            await meta.call(endpoints.JOIN, ask)
            beat = Heartbeat(session=session, known_version=version, wait_ms=300)
            return bool((await meta.call(endpoints.HEARTBEAT, beat)).grants)
        except KeylaneError:
            return False


async def verify_on_the_way(world: World, meta: MetaClient) -> None:
    """Run `verify` from time to time while faults strike."""
    while not world.faults.healed:
        await asyncio.sleep(LOOK_S)
        try:
            seen = await meta.call(endpoints.VERIFY)
        except KeylaneError:
            continue
        for check in seen.checks:
            if check.code in ALWAYS:
                world.loop.faults += [
                    f"{check.code} on the way: {violation}" for violation in check.violations
                ]
