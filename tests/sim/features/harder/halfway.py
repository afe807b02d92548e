"""Two faults at a time, at moments that chance seldom hits: the second one begins while the first
is half-way.

evacuation   brokers die, and the metaserver that drives, between the steps of an evacuation or a move
frozen       a consumer stands still from before a move and a split until after them
sync         a disk refuses one sync in the middle of a move, and then is fine
later        scheduled messages wait at a broker that is evacuated and started again
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace

from keylane.protocol import endpoints
from keylane.protocol.errors import KeylaneError
from keylane.protocol.operations import Cordon, OperationKind, Reshape
from sim.actors.hosts import BrokerHost, MetaHost
from sim.features.feature import Feature
from sim.features.later import LaterDeliveries
from sim.swarm import Swarm

STEPS = ("hosted", "sealing", "telling", "opened")
"""Steps of an operation at which its metaserver may die."""


class Halfway(Feature):
    """See the module."""

    never = frozenset({"cordon", "evacuate"})
    """Nothing else lets partitions come to a broker group that is being left."""

    @classmethod
    def plan(cls, swarm: Swarm, rng: random.Random) -> Swarm:
        return replace(
            swarm,
            faults=frozenset(name for name in sorted(swarm.faults) if rng.random() < 0.3),
            metaservers=2,
            consumers=2,
            groups=rng.choice((1, 2)),
            partitions=rng.choice((1, 2, 3)),
            messages=120,
            pace=3.0,
            fault_s=12.0,
            keys=rng.choice((1, 3, 6)),
        )

    async def work(self) -> None:
        deeds = (self._evacuate, self._freeze, self._refuse_sync)
        while not self.world.faults.healed:
            await self.pause(1.0)
            if self.world.faults.healed:
                return
            self.world.faults.done += 1
            await self.rng.choice(deeds)()
            await self.pause(2.0)

    async def _ask(self, ask: Reshape) -> None:
        meta = self.world._operator_meta
        try:
            for broker in self.world.brokers:
                if broker.group != ask.broker_group:
                    await meta.call(endpoints.CORDON, Cordon(cordoned=False), group=broker.group)
            await meta.call(endpoints.RESHAPE, ask)
        except KeylaneError as error:
            self.world.trace(f"not begun: {error!r}")
            return
        if ask.kind is OperationKind.EVACUATE:
            stay = self._staying(ask.broker_group)
            self.problems += [f"{stay} stay where all was to leave"] if stay else []

    def _staying(self, broker_group: str) -> list[int]:
        """The open partitions of a broker group that no operation is to seal."""
        raw = self.world.shelf._raw
        ask = (
            "SELECT partition_id FROM partitions p WHERE broker_group = ? AND state = "
            "'open' AND NOT EXISTS"
            " (SELECT 1 FROM steps s WHERE s.partition_id = p.partition_id AND s.action = 'seal')"
        )
        return [row[0] for row in raw.execute(ask, (broker_group,))]

    async def _evacuate(self) -> None:
        """The source, or the target, dies while its metaserver does."""
        world, rng = self.world, self.rng
        source = rng.choice(world.brokers)
        for meta in world.metas:
            self._die_at(meta, rng.choice(STEPS))
        asking = asyncio.ensure_future(
            self._ask(Reshape(kind=OperationKind.EVACUATE, broker_group=source.group))
        )
        await self.pause(0.15)
        victim = rng.choice(world.brokers)
        if victim.running and not world.faults.healed:
            victim.lose_power() if rng.random() < 0.5 else victim.end(machine_down=False)
            world.loop.after(3 * rng.random(), world.faults.restart, victim)
        await asking

    def _die_at(self, meta: MetaHost, step: str) -> None:
        meta.crash_at_step = step
        self.world.loop.after(1.0 + 2 * self.rng.random(), self._revive, meta)

    def _revive(self, meta: MetaHost) -> None:
        meta.crash_at_step = ""
        self.world.faults.restart(meta)

    async def _freeze(self) -> None:
        """Beyond its ttl, or not; what it had in hand goes on when it wakes."""
        world, rng = self.world, self.rng
        running = [each for each in world.consumers if each.running]
        if not running:
            return
        process = rng.choice(running).process
        process.paused = True
        try:
            await self.pause(0.2)
            world.operate_on(1, OperationKind.MOVE, rng.choice(("g0", "g1")))
            await self.pause(1.0)
            world.operate_on(1, OperationKind.SPLIT)
            await asyncio.sleep(rng.choice((0.3, 1.0, 1.5)) * world.swarm.ttl_ms / 1000)
            if rng.random() < 0.3:
                world.operate_on(2, OperationKind.MERGE)
        finally:
            world.loop.resume(process)

    async def _refuse_sync(self) -> None:
        """One failed sync has a broker take no more; it is started again, and its disk is as any
        other.
        """
        world, rng = self.world, self.rng
        broker = rng.choice(world.brokers)
        world.operate_on(1, OperationKind.MOVE, rng.choice(("g0", "g1")))
        await self.pause(0.1)
        if broker.running and not broker.disk.failing_operation:
            starts = broker.starts
            self.idle = False
            broker.disk.failing_operation = "fdatasync"
            await self.pause(0.1)
            broker.disk.failing_operation = ""
            await self.pause(2.0)
            self._start_anew(broker, starts)
            self.idle = True

    def _start_anew(self, broker: BrokerHost, starts: int) -> None:
        """Also once all is healed, where nothing else has: it takes no more until then, though its
        disk is fine.
        """
        if broker.running and (broker.starts == starts or not self.world.faults.healed):
            broker.lose_power()
        self.world.faults.restart(broker)


class LaterMoves(LaterDeliveries):
    """See the module."""

    faults = LaterDeliveries.faults | {"move", "resize", "meta_step"}

    async def work(self) -> None:
        moving = asyncio.ensure_future(self._move())
        try:
            await super().work()
            await moving
        finally:
            moving.cancel()

    async def _move(self) -> None:
        """Everything leaves a broker, which is started again a moment later, and at times does not
        hear the others.
        """
        world, rng = self.world, self.rng
        while not world.faults.healed:
            await self.pause(1.5)
            broker = rng.choice(world.brokers)
            for other in world.brokers:
                try:
                    await world._operator_meta.call(
                        endpoints.CORDON, Cordon(cordoned=False), group=other.group
                    )
                except KeylaneError:
                    continue
            world.operate(Reshape(kind=OperationKind.EVACUATE, broker_group=broker.group))
            await self.pause(0.6)
            if broker.running and not world.faults.healed:
                broker.end(machine_down=False)
                await self.pause(1.0)
            world.faults.restart(broker)
