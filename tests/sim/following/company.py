"""Programs that follow, in a world: when they are started, what troubles them, and the judging of
what they were given.
"""

from __future__ import annotations

import asyncio
import random
from bisect import bisect_left

from keylane.broker.partition.partition import HostedPartition
from keylane.broker.store.store import Store
from keylane.checker.events import Event
from sim.actors.clients import SUBJECT
from sim.actors.hosts import Host
from sim.following.followers import (
    BroadcastHost,
    FollowingHost,
    ReadingHost,
    draw_manners,
)
from sim.following.judge import Truth, check_follower, truth_of
from sim.machines.logs import Removed
from sim.world import Outcome, World


class Following(World):
    """
    A world with followers of one subject.

    Args:
        seed: of the story, as the kind of world takes it.
        draws: seeds what the followers are and do.
    """

    followed = SUBJECT
    """The subject."""
    keys_of = b"k"
    """How the names of its keys begin."""

    def __init__(self, seed: int, *, draws: str) -> None:
        self.followers: list[FollowingHost] = []
        self._firsts: dict[int, int] = {}
        """Of the subject's partitions on the brokers' disks at the end: the first offset."""
        self._removing: dict[int, int] = {}
        """Of these: the end of what was removed, also where the broker died before its disk said
        so.
        """
        self._times_s: list[float] = []
        """The true time of each event of the history."""
        super().__init__(seed)
        self._follow_rng = random.Random(draws)
        self._add_followers()

    @property
    def hosts(self) -> list[Host]:
        return [*super().hosts, *self.followers]

    def record(self, event: Event) -> None:
        super().record(event)
        self._times_s.append(self.loop.now)

    # ── building ──────────────────────────────────────────────────────────────────────────────────
    def _add_followers(self) -> None:
        rng = self._follow_rng
        for index in range(rng.choice((1, 2, 3))):
            self.followers.append(
                ReadingHost(
                    *self.parts_of(f"f{index}", rng),
                    meta=self._meta,
                    tick=lambda: len(self.history),
                    manners=draw_manners(rng, self.swarm.keys, of=self.keys_of),
                    owed_from=self._owed_from,
                )
            )
        if rng.random() < 0.5:
            self.followers.append(
                BroadcastHost(
                    *self.parts_of("f9", rng),
                    meta=self._meta,
                    tick=lambda: len(self.history),
                    fails=rng.choice((0.0, 0.05)),
                    slow_s=rng.choice((0.01, 0.3, 2.0)),
                )
            )
        self.calls.readers |= {
            host.name for host in self.followers if isinstance(host, ReadingHost)
        }
        for host in self.followers:
            host.may_reroute_keys = not (self.swarm.strict or self.swarm.static)
            host.subject = self.followed

    def _owed_from(self, wall_s: float) -> int | None:
        """The instant from which on everything is stored at or after a time, by every broker's
        calendar; None: they jump.
        """
        if "wall_jump" in self.swarm.faults:
            return None
        slowest = min(broker.machine.rate for broker in self.brokers)
        return bisect_left(self._times_s, (wall_s - 1_700_000_000) / slowest)

    # ── running ───────────────────────────────────────────────────────────────────────────────────
    def _start_deeds(self) -> None:
        super()._start_deeds()
        self._operator_does(self._trouble_followers())

    async def _trouble_followers(self) -> None:
        """Start the followers at some time, and end, freeze, cut off and reopen them until all is
        healed.
        """
        rng = self._follow_rng
        waiting = list(self.followers)
        while not self.faults.healed:
            await asyncio.sleep(0.8 * rng.random())
            if self.faults.healed:
                break
            if waiting and rng.random() < 0.5:
                waiting.pop(rng.randrange(len(waiting))).start()
                continue
            host = rng.choice(self.followers)
            if host.running:
                self._trouble(host, rng.random())
        for host in self.followers:
            host.calm = True

    def _trouble(self, host: FollowingHost, deed: float) -> None:
        rng, loop = self._follow_rng, self.loop
        if deed < 0.2:
            host.end(machine_down=rng.random() < 0.3)
            loop.after(2 * rng.random(), self.faults.restart, host)
        elif deed < 0.5:
            host.reopen()
        elif deed < 0.6 and not host.process.paused:
            host.process.paused = True
            loop.after(6 * rng.random() ** 2, loop.resume, host.process)
        elif deed < 0.8:
            other = rng.choice([*self.metas, *self.brokers])
            seconds = rng.choice((0.5, 2.0, 12.0)) * rng.random()
            for link in ((host.name, other.name), (other.name, host.name)):
                self.internet.cut_link(*link)
                loop.after(seconds, self.internet.heal_link, *link)

    def _drained(self) -> bool:
        return super()._drained() and all(map(self._is_at_the_end, self.followers))

    def _is_at_the_end(self, host: FollowingHost) -> bool:
        """Whether a follower says that it is through with all that brokers have."""
        return all(map(host.is_through, self._readable()))

    def _readable(self) -> list[HostedPartition]:
        """The subject's partitions at the brokers, as readers find them."""
        return [
            partition
            for broker in self.brokers
            if broker.store is not None
            for partition in broker.store.state.partitions.values()
            if partition.facts.subject == self.followed
        ]

    # ── judging ───────────────────────────────────────────────────────────────────────────────────
    def _read_log(
        self, store: Store, partition_id: int, partition: HostedPartition, removed: Removed
    ) -> None:
        if partition.facts.subject == self.followed:
            self._firsts[partition_id] = partition.first_offset
            self._removing[partition_id] = removed.upto(partition_id)
        super()._read_log(store, partition_id, partition, removed)

    def judge(self, drained_s: float) -> Outcome:
        outcome = super().judge(drained_s)
        outcome.problems += self._check_followers(whole=drained_s >= 0)
        return outcome

    def _truth(self) -> Truth:
        return truth_of(
            self.history,
            partitions=self._firsts.keys(),
            firsts=self._firsts,
            removing=self._removing,
            lost=self.shelf.lost,
            in_order=self.swarm.strict or self.swarm.static,
            static=self.swarm.static,
        )

    def _check_followers(self, *, whole: bool) -> list[str]:
        truth = self._truth()
        problems = []
        for host in self.followers:
            manners = host.manners if isinstance(host, ReadingHost) else None
            problems += host.problems
            problems += check_follower(
                host.name,
                host.notes,
                truth,
                key=manners.key if manners else None,
                in_turn=manners is not None,
                notes_removals=manners is not None,
                whole=whole,
            )
        return problems
