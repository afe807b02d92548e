"""Consumers with instance names: one that is started again takes its partitions back at once, also from a process that lives."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

from keylane.broker.partition.partition import HostedPartition
from keylane.checker.events import Granted, Replaced, Served
from keylane.checker.findings import Findings
from sim.actors.consumers import ConsumerHost
from sim.features.feature import Feature
from sim.swarm import Swarm

SETTLE_S = 6.0
"""After the healing: time for members to join, and for the group to be settled."""
TTL_MS = 6_000
AT_ONCE_S = 2.5
"""What a process that is started again needs to have its partitions: less than half of the ttl."""
Process = tuple[str, int]
"""A host's name, and the number of its start."""


class Instances(Feature):
    """See the module."""

    faults = frozenset({"consumer_crash", "consumer_pause", "lost_lease"})

    @classmethod
    def plan(cls, swarm: Swarm, rng: random.Random) -> Swarm:
        return replace(
            swarm,
            consumers=rng.choice((1, 2)),
            partitions=rng.choice((2, 3, 4)),
            messages=rng.choice((60, 90)),
            ttl_ms=TTL_MS,
        )

    def build(self) -> None:
        """Give each consumer an instance name, and another machine on which a process of that name is started too."""
        world = self.world
        world.shelf.instances = {}
        world.shelf.on_replaced = self._replaced
        self.idle = False
        self.takeovers: list[tuple[Process, Process]] = []
        """The process that was at work and lost its place, and the one that took it."""
        self.removed: set[Process] = set()
        """Processes that lost their places."""
        self.taken_back = 0
        """Processes that were started again and had their partitions at once."""
        for number, host in enumerate(list(world.consumers)):
            for each in (host, world.add_consumer()):
                each.instance = f"instance{number}"
                each.on_taken = self._told_to(each)

    def _hosts(self) -> dict[str, ConsumerHost]:
        return {host.name: host for host in self.world.consumers}

    def _replaced(self, old: str, new: str, live: bool) -> None:
        """A session of the client `old` has ended, because the client `new` has joined with its instance."""
        hosts = self._hosts()
        before, after = (old, hosts[old].starts), (new, hosts[new].starts)
        self.removed.add(before)
        if not live or hosts[old].consumer is None:  # its lease is over; or its opening goes on
            return
        if (after, before) in self.takeovers:
            self.problems.append(f"{after} takes its place back from {before}, which came later")
        self.takeovers.append((before, after))

    def _told_to(self, host: ConsumerHost) -> Any:
        def told() -> None:
            me = (host.name, host.starts)
            if me not in self.removed:
                self.problems.append(f"{me} is told that its place is taken, and nobody took it")

        return told

    async def work(self) -> None:
        """Start processes beside those of the same name; in the end start one after the other again, at once."""
        world, rng = self.world, self.rng
        while not world.faults.healed:
            await self.pause(2.0)
            down = [host for host in world.consumers if host.instance and not host.running]
            if down:
                world.faults.done += 1
                world.faults.restart(rng.choice(down))
        await asyncio.sleep(SETTLE_S)
        for host in [host for host in world.consumers if host.instance]:
            if host.running and host.consumer is not None:
                await self._start_again(host)
        self.idle = True

    async def _start_again(self, host: ConsumerHost) -> None:
        """Kill a process, start it again, and look whether it has its partitions back before its ttl could have passed."""
        world = self.world
        had = world.shelf.held_by(host.name)
        host.end(machine_down=False)
        host.start()
        until = world.loop.now + AT_ONCE_S
        while world.loop.now < until:
            await asyncio.sleep(0.05)
            if host.consumer is not None and had.keys() <= world.shelf.held_by(host.name).keys():
                break
        have = world.shelf.held_by(host.name)
        left = {number for number in had if have.get(number, had[number]) == had[number]}
        left -= world.shelf.drained_partitions
        if left:
            said = f"{host.name} was started again, and has not got {sorted(left)} of {sorted(had)}"
            self.problems.append(f"{said} back within {AT_ONCE_S} s")
        self.taken_back += bool(had) and not left

    def check(self, findings: Findings, hosted: dict[int, HostedPartition]) -> None:
        self.problems += stale_calls(self.world.history, hosted)
        running = {host.instance for host in self.world.consumers if host.running and host.instance}
        processes = sum(host.running for host in self.world.consumers if host.instance)
        if processes != len(running):
            self.problems.append(f"{processes} processes of {len(running)} instances go on")
        self.problems = self.problems[:8]


def stale_calls(history: Sequence[Any], partitions: Collection[int]) -> list[str]:
    """
    What brokers accept of sessions whose place was taken, told from grants alone.

    Once the owner that was granted a partition after such a session has acquired it, no call under the session's token
    is accepted there that was asked later.
    """
    sessions = {
        (event.partition_id, event.token): event.session
        for event in history
        if type(event) is Granted and event.partition_id in partitions
    }
    replaced: set[str] = set()
    fences: dict[int, tuple[int, int]] = {}
    """Partition → the highest token that was acquired, and when."""
    problems = []
    for now, event in enumerate(history):
        if type(event) is Replaced:
            replaced.add(event.session)
        elif type(event) is Served and event.partition_id in partitions:
            fence, since = fences.get(event.partition_id, (0, 0))
            session = sessions.get((event.partition_id, event.token), "")
            if event.token < fence and event.began > since and session in replaced:
                problems.append(f"{event} accepted after token {fence} was acquired")
            if event.kind == "acquire" and event.token > fence:
                fences[event.partition_id] = (event.token, now)
    return problems
