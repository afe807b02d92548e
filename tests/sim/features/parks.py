"""Keys whose handlers fail for a while are parked, or dead where none finds room; an operator
redrives, skips and edits, while partitions change and brokers crash.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import TYPE_CHECKING

from keylane.admin import Admin
from keylane.broker.partition import park_checks
from keylane.broker.partition.parked import Parked
from keylane.broker.partition.parked_key import NO_LOGICAL_PARTITION
from keylane.broker.partition.partition import HostedPartition
from keylane.checker.events import Edited, SetAside
from keylane.checker.findings import Findings
from keylane.protocol import endpoints
from keylane.protocol.errors import KeylaneError
from keylane.protocol.operations import OperationKind, Reshape
from keylane.protocol.parked import ChangeParkedKey, ParkedView, ParkState
from keylane.rpc.client import BrokerClient
from keylane.testing.machines.network import SimNetwork
from sim.actors.clients import SUBJECT
from sim.features.feature import Feature
from sim.swarm import Swarm

if TYPE_CHECKING:
    from sim.features.world import FeatureWorld

GROUP = "group0"
KEYS_MAX = 1
"""Keys that may be parked on a partition where others become dead letters; as many may be dead."""
EDITED = b"edited:"
"""Values that operators give begin so."""


class ParkedKeys:
    """What a group parks in a world, and what an operator does to it."""

    def __init__(self, feature: Feature) -> None:
        self._world = feature.world
        self._rng = feature.rng
        self.poison: set[bytes] = set()
        """Keys whose handlers fail, but for messages that were edited."""
        self.parked = self.redriven = self.edited = 0
        """Keys seen parked, redrives asked for, and edits told as done."""
        for consumer in self._world.consumers:
            consumer._poison = self.poison

    def poison_some(self) -> None:
        """Have the handlers of one more key fail."""
        keys = [key for producer in self._world.producers for key in producer._keys]
        self.poison.add(self._rng.choice(keys))

    def mend_some(self) -> None:
        """Have the handlers of one key fail no more."""
        if self.poison:
            self.poison.discard(self._rng.choice(sorted(self.poison)))

    async def change_some(self, *, chance: float) -> None:
        """Redrive parked keys, each with this chance; before all is healed some messages are
        skipped.
        """
        async for broker, number, view in self._listed():
            if self._rng.random() >= chance:
                continue
            skips = self._rng.random() < 0.15 and not self._world.faults.healed
            ask = ChangeParkedKey(group=GROUP, key_hex=view.key_hex)
            if skips and view.first_offset >= 0:
                row = (view.first_source, view.first_offset, view.first_offset + 1)
                self._world.record(SetAside(GROUP, row[0], 0, ((row[1], row[2]),), skipped=True))
                ask = ChangeParkedKey(group=GROUP, key_hex=view.key_hex, skip=[row])
            self.redriven += 1
            with contextlib.suppress(KeylaneError):
                await broker.control(endpoints.CHANGE_PARKED, ask, id=number)

    async def edit_some(self, problems: list[str]) -> None:
        """
        Put another value in the place of the first message of some parked keys; most are redriven
        at once.

        Half of them are named by their key: that has to be its oldest message.
        """
        world = self._world
        async for broker, number, view in self._listed():
            if self._rng.random() < 0.5 or view.first_offset < 0:
                continue
            place = (GROUP, view.first_source, view.first_offset)
            value = b"%s%d" % (EDITED, len(world.history))
            world.record(Edited(*place, value, done=False))
            key = bytes.fromhex(view.key_hex or "")
            by_key = (
                bool(key) and view.state is not ParkState.REDRIVING and self._rng.random() < 0.5
            )
            named = {"key": key} if by_key else {"partition_id": place[1], "offset": place[2]}
            try:
                async with Admin(world._meta, call_timeout_ms=1_000) as admin:
                    edited = await admin.edit_parked(SUBJECT, GROUP, **named, value=value)
            except KeylaneError as error:
                world.trace(f"not edited: {error!r}")
                continue
            if (edited.partition_id, edited.offset) != place[1:]:
                if self._has(key, place[1:]):
                    problems.append(f"{edited.offset} was edited by its key, which has {place[1:]}")
                place = GROUP, edited.partition_id, edited.offset
                world.record(Edited(*place, value, done=False))
            world.record(Edited(*place, value, done=True))
            self.edited += 1
            if self._rng.random() < 0.7:
                with contextlib.suppress(KeylaneError):
                    ask = ChangeParkedKey(group=GROUP, key_hex=view.key_hex)
                    await broker.control(endpoints.CHANGE_PARKED, ask, id=number)

    def _has(self, key: bytes, place: tuple[int, int]) -> bool:
        """True if this message is parked under the key, where no child has taken it over."""
        stores = [host.store for host in self._world.brokers if host.running and host.store]
        return any(
            not parked.frozen and (known := parked.get(key)) is not None and known.contains(place)
            for store in stores
            for parked in parked_on(store).values()
        )

    async def _listed(self) -> AsyncIterator[tuple[BrokerClient, int, ParkedView]]:
        network = SimNetwork(self._world.internet, self._world._operator)
        for host in self._world.brokers:
            broker = BrokerClient(network, host.address, timeout_ms=1_000)
            for number in sorted(parked_on(host.store)) if host.running and host.store else ():
                try:
                    page = await broker.control(
                        endpoints.PARKED, query={"count": 1000, "group": GROUP}, id=number
                    )
                except KeylaneError:
                    continue
                self.parked += len(page.keys)
                if not page.frozen:
                    for view in page.keys:
                        yield broker, number, view

    @property
    def none_left(self) -> bool:
        """Nothing is parked but what children have taken over, each key one of them."""
        brokers = self._world.brokers
        stores = [host.store for host in brokers if host.running and host.store is not None]
        if len(stores) < len(brokers):
            return False
        expired = expired_in(self._world)
        parked = {
            number: each
            for store in stores
            for number, each in parked_on(store).items()
            if number not in expired
        }
        facts = [
            partition.facts.partition
            for store in stores
            for partition in store.state.partitions.values()
        ]

        def is_taken_over(number: int, key: object, heir: int) -> bool:
            # Displaced messages go where the first logical partition of their parent goes.
            heir = parked[number].logical_partitions[0] if heir == NO_LOGICAL_PARTITION else heir
            return not (isinstance(key, bytes) and key) or any(
                child.range_start <= heir < child.range_end
                and (known := parked.get(int(child.partition_id))) is not None
                and number in known.adopted_parents
                for child in facts
            )

        return all(
            each.frozen and all(is_taken_over(number, key, heir) for key, _, heir in each.parts())
            for number, each in parked.items()
            if len(each)
        )


class Parks(Feature):
    """See the module."""

    faults = frozenset({"broker_full", "consumer_pause", "broker_crash"})

    @classmethod
    def plan(cls, swarm: Swarm, rng: random.Random) -> Swarm:
        policy = {"on_failure": "park", "tries_max": rng.choice((1, 2, 3))}
        if policy["tries_max"] != 2:
            policy["on_full"] = "dead"
        return replace(
            swarm,
            keys=rng.choice((2, 3, 6)),
            messages=rng.choice((30, 60)),
            partitions=rng.choice((1, 2, 3)),
            consumer=swarm.consumer | policy,
        )

    def build(self) -> None:
        self.keys = ParkedKeys(self)
        self._keys_max = park_checks.PARKED_KEYS_MAX
        if self.world.swarm.consumer.get("on_full"):
            park_checks.PARKED_KEYS_MAX = KEYS_MAX

    def check(self, findings: Findings, hosted: dict[int, HostedPartition]) -> None:
        park_checks.PARKED_KEYS_MAX = self._keys_max

    async def work(self) -> None:
        """Have keys fail, and redrive, skip, edit and reshape; once all is healed redrive until
        nothing is parked.
        """
        world, rng = self.world, self.rng
        while not world.faults.healed:
            await self.pause(0.8)
            deed = rng.random()
            if deed < 0.35:
                self.keys.poison_some()
            elif deed < 0.55:
                self.keys.mend_some()
            elif deed < 0.75:
                await self.keys.change_some(chance=0.5)
            elif deed < 0.9:
                await self.keys.edit_some(self.problems)
            else:
                await self._reshape()
        self.keys.poison.clear()
        while True:
            await self.keys.change_some(chance=1.0)
            await asyncio.sleep(0.5)

    async def _reshape(self) -> None:
        ask = Reshape(
            kind=OperationKind.RESIZE, subject=SUBJECT, partitions=self.rng.choice((1, 2, 3, 4))
        )
        self.world.faults.done += 1
        await self.world._reshape(ask)

    @property
    def drained(self) -> bool:
        return self.keys.none_left


def expired_in(world: FeatureWorld) -> set[int]:
    """
    Partitions of which retention has removed everything, as the database says.

    No one takes over, nor lists, what is parked there: brokers keep it as long as they host the
    partition.
    """
    rows = world.shelf._raw.execute("SELECT partition_id FROM partitions WHERE state = 'expired'")
    return {row[0] for row in rows}


def parked_on(store: object) -> dict[int, Parked]:
    """What the group has parked, by partition."""
    parked = {}
    for number, partition in store.state.partitions.items():  # type: ignore[attr-defined]
        group = partition.groups.get(GROUP)
        if partition.facts.subject == SUBJECT and group is not None and group.parked is not None:
            parked[number] = group.parked
    return parked
