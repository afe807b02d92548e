"""Keys whose handlers fail for a while are parked; an operator redrives and skips, while partitions change and brokers crash."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator
from dataclasses import replace

from keylane.broker.partition.parked import Parked
from keylane.checker.events import SetAside
from keylane.protocol.errors import KeylaneError
from keylane.protocol.operations import OperationKind, Reshape
from keylane.protocol.parked import ChangeParkedKey, ParkedView
from keylane.rpc.client import BrokerClient
from keylane.testing.machines.network import SimNetwork
from sim.actors.clients import SUBJECT
from sim.features.feature import Feature
from sim.swarm import Swarm

GROUP = "group0"


class Parks(Feature):
    """See the module."""

    faults = frozenset({"broker_full", "consumer_pause", "broker_crash"})

    @classmethod
    def plan(cls, swarm: Swarm, rng: random.Random) -> Swarm:
        policy = {"on_failure": "park", "tries_max": rng.choice((1, 2, 3))}
        return replace(
            swarm,
            keys=rng.choice((2, 3, 6)),
            messages=rng.choice((30, 60)),
            partitions=rng.choice((1, 2, 3)),
            consumer=swarm.consumer | policy,
        )

    def build(self) -> None:
        self._poison: set[bytes] = set()
        self.parked = self.redriven = 0
        """Keys seen parked, and redrives asked for."""
        for consumer in self.world.consumers:
            consumer._poison = self._poison

    async def work(self) -> None:
        """Have keys fail, and redrive, skip and reshape; once all is healed redrive until nothing is parked."""
        world, rng = self.world, self.rng
        keys = [key for producer in world.producers for key in producer._keys]
        while not world.faults.healed:
            await self.pause(0.8)
            deed = rng.random()
            if deed < 0.35:
                self._poison.add(rng.choice(keys))
            elif deed < 0.6 and self._poison:
                self._poison.discard(rng.choice(sorted(self._poison)))
            elif deed < 0.9:
                await self._change_some(chance=0.5)
            else:
                await self._reshape()
        self._poison.clear()
        while True:
            await self._change_some(chance=1.0)
            await asyncio.sleep(0.5)

    async def _reshape(self) -> None:
        ask = Reshape(
            kind=OperationKind.RESIZE, subject=SUBJECT, partitions=self.rng.choice((1, 2, 3, 4))
        )
        self.world.faults.done += 1
        await self.world._reshape(ask)

    async def _change_some(self, *, chance: float) -> None:
        """Redrive parked keys, each with this chance; before all is healed some messages are skipped."""
        async for broker, number, view in self._listed():
            if self.rng.random() >= chance:
                continue
            skips = self.rng.random() < 0.15 and not self.world.faults.healed
            ask = ChangeParkedKey(group=GROUP, key_hex=view.key_hex)
            if skips and view.first_offset >= 0:
                row = (view.first_source, view.first_offset, view.first_offset + 1)
                self.world.record(SetAside(GROUP, row[0], 0, ((row[1], row[2]),), skipped=True))
                ask = ChangeParkedKey(group=GROUP, key_hex=view.key_hex, skip=[row])
            self.redriven += 1
            with contextlib.suppress(KeylaneError):
                await broker.change_parked(number, ask)

    async def _listed(self) -> AsyncIterator[tuple[BrokerClient, int, ParkedView]]:
        network = SimNetwork(self.world.internet, self.world._operator)
        for host in self.world.brokers:
            broker = BrokerClient(network, host.address, timeout_ms=1_000)
            for number in sorted(_parked_on(host.store)) if host.running and host.store else ():
                try:
                    page = await broker.parked(number, GROUP)
                except KeylaneError:
                    continue
                self.parked += len(page.keys)
                if not page.frozen:
                    for view in page.keys:
                        yield broker, number, view

    @property
    def drained(self) -> bool:
        """Nothing is parked but what children have taken over."""
        return all(
            host.running
            and host.store is not None
            and not any(
                len(parked) and not parked.frozen for parked in _parked_on(host.store).values()
            )
            for host in self.world.brokers
        )


def _parked_on(store: object) -> dict[int, Parked]:
    """What the group has parked, by partition."""
    parked = {}
    for number, partition in store.state.partitions.items():  # type: ignore[attr-defined]
        group = partition.groups.get(GROUP)
        if partition.facts.subject == SUBJECT and group is not None and group.parked is not None:
            parked[number] = group.parked
    return parked
