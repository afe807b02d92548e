"""Loops of programs give messages back, while keys are parked or dead, the group's policy changes,
operators redrive, and programs die.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from keylane.admin import Admin
from keylane.broker.partition.partition import HostedPartition
from keylane.checker.events import Ended, Sent, SetAside, Started, Stored
from keylane.checker.findings import Findings
from keylane.protocol.errors import KeylaneError
from keylane.protocol.operations import OperationKind, Reshape
from sim.actors.clients import SUBJECT
from sim.actors.consumers import ConsumerHost
from sim.actors.loops import LoopingHost, draw_manners, has_opened
from sim.features.feature import Feature
from sim.features.parks import GROUP, ParkedKeys
from sim.swarm import Swarm

PROMPT_EVERY = 120
PROMPT = range(30, 60)
"""Remainders of the numbers of worlds by PROMPT_EVERY where keys are redriven at once, before loops
have opened what they had pulled.
"""
HELD = range(90, 120)
"""Remainders of the numbers of worlds by PROMPT_EVERY where partitions are paused while a key
fails, and its later messages wait opened.
"""
POLICIES = ("park", "park", "park", "block", "dead")
HOLDS = 20
PROBLEMS_MAX = 8


class Loops(Feature):
    """See the module."""

    faults = frozenset({"consumer_crash", "consumer_pause", "broker_crash"})
    consumer_kind = LoopingHost

    @classmethod
    def plan(cls, swarm: Swarm, rng: random.Random) -> Swarm:
        policy: dict[str, Any] = {
            "on_failure": rng.choice(POLICIES),
            "tries_max": rng.choice((1, 1, 2, 3)),
            "max_records": rng.choice((1, 3, 20)),
            "max_wait_ms": rng.choice((0, 0, 50)),
        }
        return replace(
            swarm,
            consumers=rng.choice((1, 1, 2)),
            keys=rng.choice((2, 3, 6)),
            messages=rng.choice((40, 80)),
            partitions=rng.choice((1, 1, 2)),
            producer=swarm.producer | {"batch_count": rng.choice((1, 1, 3, 20))},
            consumer=swarm.consumer | policy,
            manners=swarm.manners | {"fails": rng.choice((0.0, 0.05)), "bad_keys": 0.0},
        )

    def build(self) -> None:
        self._manners = draw_manners(self.rng)
        self._work_s = self.rng.choice((0.05, 0.4, 0.4))
        self.keys = ParkedKeys(self)
        for consumer in self.world.consumers:
            self.adopt(consumer)

    def adopt(self, consumer: ConsumerHost) -> None:
        assert isinstance(consumer, LoopingHost)
        consumer.manners, consumer.work_s = self._manners, self._work_s
        super().adopt(consumer)

    async def work(self) -> None:
        """Have keys fail, redrive, change the policy, pause and reshape; once all is healed redrive
        until nothing is parked.
        """
        kind = self.world.number % PROMPT_EVERY
        while not self.world.faults.healed:
            await self.pause(0.5)
            await self._deed(self.rng.random())
            if kind in PROMPT:
                await self._redrive_at_once()
            elif kind in HELD:
                await self._hold_at_once()
        self.keys.poison.clear()
        self._end_arrow()
        while True:
            await self.keys.change_some(chance=1.0)
            await asyncio.sleep(0.5)

    def _end_arrow(self) -> None:
        """Have no program take Arrow data where others park: what is redriven waits for one that
        takes messages.
        """
        if len(self._manners) == 1:
            return
        for host in self.world.consumers:
            assert isinstance(host, LoopingHost)
            host.manners = tuple(each for each in host.manners if each != "batches")
            if host.running and host.manner == "batches":
                host.end(machine_down=False)
                host.start()

    async def _deed(self, deed: float) -> None:
        world, rng = self.world, self.rng
        if deed < 0.25:
            self.keys.poison_some()
        elif deed < 0.45:
            self.keys.mend_some()
        elif deed < 0.65:
            await self.keys.change_some(chance=0.7)
        elif deed < 0.7:
            await self.keys.edit_some(self.problems)
        elif deed < 0.78:
            await self._set_policy()
        elif deed < 0.92:
            host = rng.choice(world.consumers)
            assert isinstance(host, LoopingHost)
            host.hold(3 * rng.random())
        else:
            ask = Reshape(
                kind=OperationKind.RESIZE, subject=SUBJECT, partitions=rng.choice((1, 2, 3))
            )
            world.faults.done += 1
            await world._reshape(ask)

    async def _redrive_at_once(self) -> None:
        """Have a key fail, and handled again within a second or two."""
        self.keys.poison_some()
        await self.pause(0.5)
        self.keys.poison.clear()
        await self.keys.change_some(chance=1.0)

    async def _hold_at_once(self) -> None:
        """Have a key fail, and pause partitions of loops that have opened more than they handed
        out.
        """
        self.keys.poison_some()
        for _ in range(HOLDS):
            for host in self.world.consumers:
                assert isinstance(host, LoopingHost)
                if has_opened(host):
                    host.hold(self.rng.random())
            await self.pause(0.1)
        self.keys.poison.clear()
        await self.keys.change_some(chance=1.0)

    async def _set_policy(self) -> None:
        """Store another policy of the group, which its consumers follow within a heartbeat."""
        policy = self.rng.choice(POLICIES)
        tries_max = self.rng.choice((1, 2, 3))
        self.world.trace(f"policy {policy}, {tries_max} tries")
        with contextlib.suppress(KeylaneError):
            async with Admin(self.world._meta, call_timeout_ms=1_000) as admin:
                await admin.set_group(SUBJECT, GROUP, on_failure=policy, tries_max=tries_max)

    @property
    def drained(self) -> bool:
        return self.keys.none_left

    def check(self, findings: Findings, hosted: dict[int, HostedPartition]) -> None:
        self.problems += overtaken(self.world.history)[:PROBLEMS_MAX]


def overtaken(history: Sequence[Any]) -> list[str]:
    """
    The messages with which the group began before an earlier one of their key was handled; told
    from the producers' numbers alone.

    Messages that were set aside alone, or that an operator gave up, are waited for by none.
    """
    numbers = {
        event.value: (event.producer, event.key, event.number)
        for event in history
        if type(event) is Sent and event.key
    }
    sendings: dict[tuple[int, int], tuple[str, bytes, int]] = {}
    lanes: defaultdict[tuple[str, bytes], dict[int, tuple[int, int]]] = defaultdict(dict)
    for event in history:
        if type(event) is Stored and event.value in numbers:
            place = event.partition_id, event.offset
            producer, key, number = sendings[place] = numbers[event.value]
            lanes[producer, key].setdefault(number, place)
    problems: list[str] = []
    done: set[tuple[int, int]] = set()
    seen: set[tuple[int, int]] = set()
    for event in history:
        match event:
            case SetAside(group=group) if group == GROUP and (event.skipped or event.alone):
                done |= {
                    (event.partition_id, offset)
                    for start, end in event.ranges
                    for offset in range(start, end)
                }
            case Ended(group=group) if group == GROUP:
                done.add((event.partition_id, event.offset))
            case Started(group=group) if group == GROUP:
                place = event.partition_id, event.offset
                if place in seen or place not in sendings:
                    continue
                seen.add(place)
                producer, key, number = sendings[place]
                problems += [
                    f"{place} of {key!r}, number {number} of {producer}, was begun before number "
                    f"{earlier} was handled"
                    for earlier, before in sorted(lanes[producer, key].items())
                    if earlier < number and before not in done
                ]
    return problems
