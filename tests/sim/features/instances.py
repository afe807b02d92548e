"""Consumers with instance names: one that is started again takes its partitions back at once, also
from a process that lives.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from keylane.broker.partition.partition import HostedPartition
from keylane.checker.events import Granted, Replaced, Served
from keylane.checker.findings import Findings
from keylane.consumer.client import Consumer
from keylane.protocol.errors import FencedError
from sim.actors.consumers import ConsumerHost
from sim.actors.users import Identities
from sim.features.feature import Feature
from sim.swarm import Swarm

SETTLE_S = 6.0
"""After the healing: time for members to join, and for the group to be settled."""
TTL_MS = 6_000
AT_ONCE_S = 2.5
"""What a process that is started again needs to have its partitions: less than half of the ttl."""


class SessionIds(Identities):
    """Notes when each session's id was drawn, which is when its join is sent for the first time."""

    def __init__(self, draw: Identities, now: Callable[[], float]) -> None:
        self._draw, self._now = draw, now
        self.drawn: dict[str, float] = {}

    def __call__(self, bits: int) -> int:
        number = self._draw(bits)
        self.drawn[f"{number:032x}"] = self._now()
        return number


class NamedHost(ConsumerHost):
    """A consumer with an instance name, which it shares with its twin on another machine; it ends
    when its place is taken.
    """

    twin: NamedHost | None = None
    """None: it has no instance name."""
    _open: Consumer | None = None
    started_s = opened_s = ended_s = -1.0
    """Of its last process; `opened_s` is -1 until it is open."""
    problem = ""
    silent: set[str] = set()  # noqa: RUF012 - replaced in each host that has an instance
    """The names of hosts whose session has expired since they were started."""
    replaced_by: Mapping[str, str] = {}
    """Session → the one that took its place, if that began then for the first time."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self._identities = self.ids = SessionIds(self._identities, lambda: self.loop.now)

    @property
    def consumer(self) -> Consumer | None:  # type: ignore[override]
        """Its consumer while that is open."""
        return self._open

    @consumer.setter
    def consumer(self, consumer: Consumer | None) -> None:
        if consumer is not None:
            self.opened_s = self.loop.now
        self._open = consumer

    def start(self) -> None:
        self.started_s, self.opened_s = self.loop.now, -1.0
        if self.instance:
            self.silent.discard(self.name)
        super().start()

    def end(self, *, machine_down: bool) -> None:
        self.ended_s = self.loop.now
        super().end(machine_down=machine_down)

    async def _run(self) -> None:
        try:
            await super()._run()
        except FencedError:
            twin = self.twin
            assert twin is not None
            # One that was not heard for its ttl has lost its place to a process that is there.
            heard = self.name not in self.silent
            older = twin.is_of_before(self.started_s)
            if heard and older and not self._met_late_join(twin):
                self.problem = f"{self.name} was started last, and is told that its place is taken"
            if self.leaving:
                return
            if self.consumer is not None:
                await self._close_consumer(self.consumer)
            self.end(machine_down=False)

    def _met_late_join(self, twin: NamedHost) -> bool:
        """
        Whether a join that the twin had sent before this process was started, or that an earlier
        opening of this process had sent, has taken the place of a session of this process.

        No metaserver had heard of it, so that it is taken for the join of a process that was
        started last. Once its session has expired, the twin and this process are as good as each
        other; see decision 35.
        """
        return any(
            (drawn_s := self.ids.drawn.get(session, -1.0)) >= self.started_s
            and (
                twin.ids.drawn.get(late, self.started_s) < self.started_s
                or self.ids.drawn.get(late, drawn_s) < drawn_s
            )
            for session, late in self.replaced_by.items()
        )

    def is_of_before(self, since_s: float) -> bool:
        """Whether its last process was open, or had ended, before this moment: it has joined
        before, if at all.
        """
        ended = not self.running and self.ended_s < since_s
        return self.started_s < since_s and (ended or -1.0 < self.opened_s < since_s)


class Instances(Feature):
    """See the module."""

    faults = frozenset({"consumer_crash", "consumer_pause", "lost_lease"})
    consumer_kind = NamedHost

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
        """Give each consumer an instance name, and another machine on which a process of that name
        is started too.
        """
        world = self.world
        world.shelf.instances = {}
        self.idle = False
        self.hosts: list[NamedHost] = []
        self.taken_back = 0
        """Processes that were started again and had their partitions at once."""
        for number in range(len(world.consumers)):
            pair = (world.consumers[number], world.add_consumer())
            for host, twin in (pair, pair[::-1]):
                assert isinstance(host, NamedHost)
                assert isinstance(twin, NamedHost)
                host.instance, host.twin = f"instance{number}", twin
                host.silent = world.shelf.silent
                host.replaced_by = world.shelf.replaced_by
                self.hosts.append(host)

    async def work(self) -> None:
        """Start processes beside those of the same name; in the end start one after the other
        again, at once.
        """
        world, rng = self.world, self.rng
        while not world.faults.healed:
            await self.pause(2.0)
            down = [host for host in self.hosts if not host.running]
            if down:
                world.faults.done += 1
                world.faults.restart(rng.choice(down))
        await asyncio.sleep(SETTLE_S)
        for host in self.hosts:
            if host.running and host.consumer is not None:
                await self._start_again(host)
        self.idle = True

    async def _start_again(self, host: NamedHost) -> None:
        """Kill a process, start it again, and look whether it has its partitions back before its
        ttl could have passed.
        """
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
        # A member that has come a moment before is given its share at once, of partitions that no
        # session holds while this one joins.
        others = [host.twin, host]
        shares = [world.shelf.held_by(each.name) for each in self.hosts if each not in others]
        left -= {number for share in shares if len(share) <= len(have) for number in share}
        if left:
            said = f"{host.name} was started again, and has not got {sorted(left)} of {sorted(had)}"
            self.problems.append(f"{said} back within {AT_ONCE_S} s")
        self.taken_back += bool(had) and not left

    def check(self, findings: Findings, hosted: dict[int, HostedPartition]) -> None:
        self.problems += stale_calls(self.world.history, hosted)
        self.problems += [host.problem for host in self.hosts if host.problem]
        for host in self.hosts[::2]:
            assert host.twin is not None
            processes = host.running + host.twin.running
            if processes != 1:
                self.problems.append(f"{processes} processes of {host.instance} go on")
        self.problems = self.problems[:8]


def stale_calls(history: Sequence[Any], partitions: Collection[int]) -> list[str]:
    """
    What brokers accept of sessions whose place was taken, told from grants alone.

    Once the owner that was granted a partition after such a session has acquired it, no call under
    the session's token is accepted there that was asked later.
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
