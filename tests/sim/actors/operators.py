"""What operators do beside reshaping, in some seeds: a broker group given up, a group's progress
set anew, a short retention.

They draw from rng of their own, so that every other seed is the run it was before there were any.
An operator who hears that something is half done does it again until it is whole, after the healing
too.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

from keylane.checker.events import Served
from keylane.protocol import endpoints
from keylane.protocol.batch import batch_starts
from keylane.protocol.errors import Fate, KeylaneError, RetryRule
from keylane.protocol.operations import Cordon, OperationKind, Reshape
from keylane.protocol.progress import GroupReset, ResetGroup, ResetTo
from keylane.rpc.client import MetaClient
from sim.actors.clients import SUBJECT
from sim.actors.consumers import ConsumerHost
from sim.actors.hosts import BrokerHost
from sim.swarm import Swarm

if TYPE_CHECKING:
    from sim.world import World

ACTIONS = ("abandon", "reset")
SILENT_S = 8.0
"""A broker that is to be given up is away for as long at most: more than its ttl."""
PATIENCE_S = 6.0
"""After this an operator gives up a reset that was never begun."""


def is_operated(seed: int) -> bool:
    """Whether operators are at work in a seed."""
    return seed % 8 == 5


def for_operators(seed: int, swarm: Swarm) -> Swarm:
    """The plan of such a seed: longer; half of them let messages be reordered, half have old
    segments removed.
    """
    rng = random.Random(f"plan {seed}")
    plan = replace(swarm, strict=rng.random() < 0.5, fault_s=max(12.0, swarm.fault_s))
    if rng.random() < 0.5:
        return plan
    few = {"segment_bytes": 4_096, "retention_bytes": rng.choice((1, 8_192))}
    return replace(plan, broker=plan.broker | few)


async def uncordon(broker_group: str, meta: MetaClient) -> None:
    """Give a broker group new partitions again, asking until it is done."""
    while True:
        try:
            await meta.call(endpoints.CORDON, Cordon(cordoned=False), group=broker_group)
            return
        except KeylaneError:
            await asyncio.sleep(0.3)


async def uncordon_all_but(
    brokers: Iterable[BrokerHost], left_out: BrokerHost, meta: MetaClient
) -> None:
    """Let the other broker groups take the partitions of the one that is evacuated."""
    for broker in brokers:
        if broker is not left_out:
            await meta.call(endpoints.CORDON, Cordon(cordoned=False), group=broker.group)


def draw_reset(world: World, rng: random.Random) -> ResetGroup:
    """
    To the first message, behind the last, or somewhere between; mostly the whole of it.

    A partition set by itself leaves the order between partitions to the operator: only where none
    is promised.
    """
    to = rng.choice((ResetTo.EARLIEST, ResetTo.EARLIEST, ResetTo.LATEST, *ResetTo))
    if to is ResetTo.TIME:
        wall_ms = rng.choice(world.brokers).machine.wall_ms()
        ago_ms = int(1_000 * rng.random() * world.loop.now)
        return ResetGroup(to=to, at_ms=max(0, wall_ms - ago_ms))
    if to is not ResetTo.OFFSET or (world.swarm.strict and not world.swarm.static):
        return ResetGroup(to=to if to is not ResetTo.OFFSET else ResetTo.EARLIEST)
    hosted = [broker.store.state.partitions for broker in world.brokers if broker.store is not None]
    some = [partition for partitions in hosted for partition in partitions.values()]
    if not some:
        return ResetGroup(to=ResetTo.EARLIEST)
    partition = rng.choice(some)
    facts = partition.facts.partition
    offset = rng.randint(0, partition.readable_offset)
    if world.swarm.static:
        return ResetGroup(to=to, queue=facts.queue, offset=facts.logic_start + offset)
    return ResetGroup(to=to, partition_id=facts.partition_id, offset=offset)


def untold_resets(world: World, group: str, answer: GroupReset) -> list[str]:
    """The cursors that an operator was told of and that no broker has set."""
    done = {
        (event.partition_id, event.token)
        for event in world.history
        if type(event) is Served and event.kind == "reset" and event.group == group
    }
    return [
        f"told as set, and no broker knows: {cursor}"
        for cursor in answer.cursors
        if (cursor.partition_id, cursor.token) not in done
    ]


def late_cursors(world: World, ask: ResetGroup, answer: GroupReset) -> list[str]:
    """The cursors of a reset to a time that are behind a message of that time, or of a later
    one.
    """
    if ask.at_ms is None:
        return []
    late = []
    for cursor in answer.cursors:
        for broker in world.brokers:
            store = broker.store if broker.running else None
            partition = store.state.partitions.get(cursor.partition_id) if store else None
            if store is None or partition is None:
                continue
            if partition.first_offset < cursor.cursor <= partition.readable_offset:
                end = partition.readable_offset
                data, _ = store._reader.read(cursor.partition_id, cursor.cursor - 1, end, 1)
                at_ms = batch_starts(data)[0][1].appended_at_ms
                if at_ms >= ask.at_ms:
                    late.append(f"reset to {ask.at_ms}, behind a message of {at_ms}: {cursor}")
    return late


class Operator:
    """Acts upon a world from time to time, until it is healed."""

    def __init__(self, world: World, meta: MetaClient) -> None:
        self._world = world
        self._meta = meta
        self._rng = rng = random.Random(f"operator {world.seed}")
        self._actions = sorted(name for name in ACTIONS if rng.random() < 0.6) or list(ACTIONS)
        self._gap_s = rng.choice((1.0, 3.0))
        self.idle = True
        """No action that it began is under way."""
        self.abandoned = False
        """Children may have been opened before a parent was sealed."""

    async def work(self) -> None:
        """One action after the other."""
        self.idle = False
        actions: dict[str, Callable[[], Awaitable[None]]] = {
            name: getattr(self, f"_{name}") for name in self._actions
        }
        while True:
            await asyncio.sleep(2 * self._gap_s * self._rng.random())
            if self._world.faults.healed:
                break
            name = self._rng.choice(self._actions)
            self._world.faults.done += 1
            self._world.trace(f"operator {name}")
            await actions[name]()
        self.idle = True

    # ── a broker group given up ───────────────────────────────────────────────────────────────────
    async def _abandon(self) -> None:
        """Evacuate a broker group without its broker, which is dead or only cut off from the
        metaservers.
        """
        world, rng = self._world, self._rng
        broker = rng.choice(world.brokers)
        back = self._take_away(broker)
        until = world.loop.now + SILENT_S
        self.abandoned = True
        ask = Reshape(kind=OperationKind.EVACUATE, broker_group=broker.group, without_source=True)
        while world.loop.now < until and not world.faults.healed:
            try:
                await uncordon_all_but(world.brokers, broker, self._meta)
                answer = await self._meta.call(endpoints.RESHAPE, ask)
            except (
                KeylaneError
            ) as error:  # the broker still answers, or an earlier operation still runs
                world.trace(f"not given up: {error!r}")
                await asyncio.sleep(0.4)
            else:
                world.trace(f"given up: {answer!r}")
                await asyncio.sleep(3 * rng.random())
                break
        back()
        await asyncio.sleep(2 * rng.random())
        await uncordon(broker.group, self._meta)

    def _take_away(self, broker: BrokerHost) -> Callable[[], None]:
        """Kill the broker or cut it off; returns the function that brings it back."""
        world, rng = self._world, self._rng
        if rng.random() < 0.5:
            if broker.running:
                broker.lose_power() if rng.random() < 0.5 else broker.end(machine_down=False)
            return lambda: world.faults.restart(broker)
        links = [
            link
            for meta in world.metas
            for link in ((broker.name, meta.name), (meta.name, broker.name))
        ]
        for link in links:
            world.internet.cut_link(*link)

        def heal() -> None:
            for link in links:
                world.internet.heal_link(*link)

        return heal

    # ── progress ──────────────────────────────────────────────────────────────────────────────────
    async def _reset(self) -> None:
        """A group stops, its progress is set, and it starts again from there."""
        world = self._world
        group = f"group{self._rng.randrange(world.swarm.groups)}"
        ask = draw_reset(world, self._rng)
        until = world.loop.now + PATIENCE_S
        begun = False
        while begun or world.loop.now < until:
            for consumer in self._consumers(group):
                consumer.leave()
            try:
                answer = await self._meta.call(
                    endpoints.RESET_GROUP, ask, subject=SUBJECT, group=group
                )
            except KeylaneError as error:
                world.trace(f"not set: {error!r}")
                gone = error.retry in {RetryRule.NEVER, RetryRule.AFTER_NEW_ROUTE}
                if begun and error.fate is Fate.NOT_DONE and gone:
                    ask = ResetGroup(to=ResetTo.EARLIEST)  # what was asked for is gone
                elif error.retry is RetryRule.NEVER:
                    break
                begun = begun or error.fate is not Fate.NOT_DONE
                await asyncio.sleep(0.1 + 0.4 * self._rng.random())
            else:
                world.loop.faults += untold_resets(world, group, answer)
                world.loop.faults += late_cursors(world, ask, answer)
                break
        for consumer in self._consumers(group):
            while consumer.leaving:  # it has left, and is not at its end yet
                await asyncio.sleep(0.1)
            world.faults.restart(consumer)

    def _consumers(self, group: str) -> list[ConsumerHost]:
        return [consumer for consumer in self._world.consumers if consumer.group == group]
