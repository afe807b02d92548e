"""A consumer is cut off from one broker alone: others get what it has there, and nothing else
moves.

While faults strike, pairs of a consumer and a broker are cut, for longer than a consumer is patient
too. Once all is healed, one thing happens alone, and is judged: one consumer is cut off from a
broker; all are; or the broker is away for everybody.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import replace

from keylane.checker.events import Granted
from keylane.consumer.group.reachability import patience_for
from sim.actors.clients import SUBJECT
from sim.actors.consumers import ConsumerHost
from sim.actors.hosts import BrokerHost
from sim.features.feature import Feature
from sim.service import Service
from sim.swarm import Swarm

GROUP = "group0"
LOOK_S = 0.25
BURST_S = 1.0
QUIET_S = 10.0
"""For so long nothing moves in the end, while the cut lasts."""
FAULTS_OVER_S = 8.0
"""Cuts that struck just before the healing have ended by then."""
CUTS_S = (1.0, 6.0, 20.0, 28.0)
"""The second half is more than the patience."""


class CutOffs(Feature):
    """See the module."""

    faults = frozenset({"consumer_crash", "meta_crash"})
    drain_s = 240.0

    @classmethod
    def plan(cls, swarm: Swarm, rng: random.Random) -> Swarm:
        return replace(
            swarm,
            consumers=rng.choice((2, 3)),
            partitions=rng.choice((2, 3, 4, 6)),
            keys=12,
            ttl_ms=rng.choice(
                (2_000, 3_000)
            ),  # within one second a slow metaserver is at times too late
            fault_s=rng.choice((10.0, 40.0)),
            gap_s=rng.choice((1.0, 2.0, 4.0)),
        )

    def build(self) -> None:
        self._patience_s = 1.1 * patience_for(self.world.swarm.ttl_ms) / 1000
        self._deed = self.rng.choice(("one", "one", "all", "away"))
        self._watch = Service(
            self.world.brokers, [GROUP], ttl_ms=self.world.swarm.ttl_ms, subject=SUBJECT
        )
        self._watch.limit_s += self._patience_s
        self._over_s = 0.0
        """When the last cut of before is over, whose end would end one that is made alone."""
        self._done = False

    @property
    def drained(self) -> bool:
        return self._done

    # ── while faults strike ───────────────────────────────────────────────────────────────────────
    async def work(self) -> None:
        """Cut while faults strike; afterwards do one thing alone, see that it is answered, and that
        it leaves nothing behind.
        """
        world, rng = self.world, self.rng
        while not world.faults.healed:
            await self.pause(6.0)
            if not world.faults.healed:
                world.faults.done += 1
                some = rng.choice(world.consumers), rng.choice(world.brokers)
                self._cut(*some, seconds=rng.choice(CUTS_S) * (0.5 + rng.random() / 2))
        self.idle = False
        await asyncio.sleep(max(FAULTS_OVER_S, self._over_s - world.loop.now))
        await self._until(self._even, "before")
        if not self.problems:
            await {"one": self._cut_one, "all": self._cut_all, "away": self._take_away}[
                self._deed
            ]()
            await self._until(self._even, "after")
        self.idle = self._done = True

    def _links(self, consumer: ConsumerHost, broker: BrokerHost) -> list[tuple[str, str]]:
        links = [(consumer.name, broker.name), (broker.name, consumer.name)]
        return links if self.rng.random() < 0.7 else [self.rng.choice(links)]

    def _cut(self, consumer: ConsumerHost, broker: BrokerHost, *, seconds: float) -> None:
        self._over_s = max(self._over_s, self.world.loop.now + seconds)
        for link in self._links(consumer, broker):
            self.world.internet.cut_link(*link)
            self.world.loop.after(seconds, self.world.internet.heal_link, *link)

    # ── alone ─────────────────────────────────────────────────────────────────────────────────────
    def _even(self) -> bool:
        """Whether all that was sent is handled, and members have as many partitions, but for
        one.
        """
        world = self.world
        if not all(host.running and host.consumer is not None for host in world.consumers):
            return False
        busy = any(each.busy or each.waiting for each in world.producers)
        return not busy and self._watch.drained and not world.shelf.uneven_shares()

    async def _until(self, settled: Callable[[], bool], when: str) -> None:
        """Wait until it has been so for a ttl; a group that has lost a member is not settled
        before.
        """
        until = self.world.loop.now + self._patience_s + self._watch.limit_s
        since: float | None = None
        while since is None or self.world.loop.now < since + self.world.swarm.ttl_ms / 1000:
            await asyncio.sleep(LOOK_S)
            quiet = settled() and await self.world._operations_done()
            since = (since or self.world.loop.now) if quiet else None
            if self.world.loop.now > until:
                self.problems.append(f"{when} {self._deed}: {self.world.shelf.uneven_shares()}")
                return

    def _owners(self) -> dict[int, str]:
        """Partition → the client that has it."""
        ask = "SELECT partition_id, client FROM leases JOIN sessions USING (session)"
        return dict(self.world.shelf._raw.execute(ask).fetchall())

    def _at(self, broker: BrokerHost) -> set[int]:
        assert broker.store is not None
        return {int(number) for number in broker.store.state.partitions}

    async def _watched(self, seconds: float, *, served: bool) -> list[Granted]:
        """Have messages sent for a while, and return what goes to others meanwhile; with `served`,
        no partition waits too long.
        """
        world = self.world
        began, until, burst_s = len(world.history), world.loop.now + seconds, 0.0
        while world.loop.now < until:
            await asyncio.sleep(LOOK_S)
            if world.loop.now >= burst_s:
                burst_s = world.loop.now + BURST_S
                for producer in world.producers:
                    producer.burst()
            if served:
                self._watch.look(world.loop.now)
        self.problems += self._watch.problems.values()
        granted = [event for event in world.history[began:] if type(event) is Granted]
        # A member that was late with its heartbeats may have got its own partition anew.
        return [event for event in granted if event.session != event.holder]

    async def _cut_one(self) -> None:
        """The partitions that one member has at the broker go to others, and stay there; at most it
        gets others for them.
        """
        world = self.world
        broker = self.rng.choice(world.brokers)
        there, before = self._at(broker), self._owners()
        held = {before[number] for number in sorted(there & before.keys())}
        some = [host for host in world.consumers if host.name in held] or world.consumers
        cut_off = self.rng.choice(some)
        links = self._links(cut_off, broker)
        for link in links:
            world.internet.cut_link(*link)
        await self._watched(self._watch.limit_s, served=True)
        after = self._owners()
        for number in sorted(before.keys() & after.keys()):
            left = before[number] == cut_off.name and number in there
            came = after[number] == cut_off.name and number not in there
            if before[number] != after[number] and not left and not came:
                self.problems.append(
                    f"{number} went from {before[number]} to {after[number]}, and {cut_off.name} "
                    f"was cut off from {broker.name}"
                )
        self._stays(await self._watched(QUIET_S, served=True))
        others = [host for host in world.consumers if host is not cut_off]
        if len(others) > 1 and self.rng.random() < 0.5:  # one ends and comes back meanwhile
            other = self.rng.choice(others)
            other.end(machine_down=False)
            world.loop.after(5 * self.rng.random(), world.faults.restart, other)
            await self._watched(QUIET_S, served=True)
        for link in links:
            world.internet.heal_link(*link)

    async def _cut_all(self) -> None:
        """Where no member gets at the broker, each of its partitions stays with one, and does not
        go round.
        """
        world = self.world
        broker = self.rng.choice(world.brokers)
        links = [link for host in world.consumers for link in self._links(host, broker)]
        for link in links:
            world.internet.cut_link(*link)
        # Who says it first has its partitions passed on to those who say it next.
        await self._watched(2 * self._watch.limit_s, served=False)
        self._stays(await self._watched(QUIET_S, served=False))
        for link in links:
            world.internet.heal_link(*link)

    async def _take_away(self) -> None:
        """While a broker is away for everybody, nothing moves."""
        world = self.world
        broker = self.rng.choice(world.brokers)
        broker.end(machine_down=False)
        self._stays(await self._watched(self._watch.limit_s, served=False))
        world.faults.restart(broker)

    def _stays(self, granted: list[Granted]) -> None:
        self.problems += [f"{self._deed}: {event} for no reason" for event in granted[:3]]
