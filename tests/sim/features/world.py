"""A world in which a feature is at work beside the usual programs, in seeds from FEATURES_FIRST on.

Every seed has one feature, see `kind_of`; its number is the seed's distance from FEATURES_FIRST.
The usual programs of such a world have no habits, and no other seed shares a generator with it.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from keylane.broker.partition.partition import HostedPartition
from keylane.broker.store.store import Store
from keylane.checker.findings import Findings
from keylane.protocol.errors import KeylaneError
from sim.actors.clients import SUBJECT
from sim.actors.consumers import ConsumerHost
from sim.actors.copying import has_copies
from sim.actors.hosts import META_SETTINGS
from sim.actors.operators import uncordon
from sim.actors.outboxes import Outboxes
from sim.features.cut_overs import CutOvers
from sim.features.deletions import Deletions
from sim.features.feature import Feature
from sim.features.first_sends import MADE, PARTITIONS, FirstSends
from sim.features.growths import Growths
from sim.features.harder.cut_off import CutOffs
from sim.features.harder.halfway import Halfway, LaterMoves
from sim.features.harder.killers import Killers
from sim.features.harder.parked import DamagedParks, RetainedParks
from sim.features.harder.past import HISTORY_MS, ForgottenCutOvers, ForgottenDeletions
from sim.features.harder.quotas import Quotas
from sim.features.instances import Instances
from sim.features.lacking import Damaged, OnCopies, OnLostDisks, RemovedByAge
from sim.features.later import LaterDeliveries
from sim.features.live_resets import LiveResetting
from sim.features.loops import Loops
from sim.features.parks import Parks
from sim.features.relays import RelayedOutboxes, Relays
from sim.features.retries import Retries
from sim.features.scheduling import SchedulingBrokerHost
from sim.features.tables import Tables
from sim.features.views import check_view, seen_from
from sim.machines.logs import Removed
from sim.run import FEATURES_FIRST
from sim.service import Service
from sim.swarm import Swarm, draw
from sim.world import Outcome, World

STRIDE = 96
"""Worlds whose seeds are multiples of this do nothing of what only some seeds do: copies, losses,
twins, resets.
"""
CORDONED_S = 1.0
"""How long a cordon that is left over stands at most, once all is healed."""
FEATURES: tuple[type[Feature], ...] = (Deletions, Growths, LaterDeliveries, Tables, FirstSends)


OTHERS_EVERY = 15
OTHERS: dict[int, type[Feature]] = {
    5: LiveResetting,
    6: Parks,
    9: Parks,
    11: Parks,
    12: Instances,
    13: Retries,
    14: Relays,
}
"""By the remainders of numbers by OTHERS_EVERY."""
SELDOM_EVERY = 30
SELDOM: dict[int, type[Feature]] = {11: Loops, 24: Loops, 29: CutOvers}
"""By the remainders of numbers by SELDOM_EVERY, before all others."""


LACKING_AT = 23
"""Of the numbers by SELDOM_EVERY: sources of retries lack messages, for each of these reasons in
turn.
"""
LACKING: tuple[type[Feature], ...] = (Damaged, RemovedByAge, OnLostDisks, OnCopies)

HARDER_FROM = 1_000_000
"""Worlds of lower numbers are what they were before there were these: mutants and faults are known
by them.
"""
HARDER: dict[int, type[Feature]] = {
    1: DamagedParks,
    2: Halfway,
    4: ForgottenCutOvers,
    7: Killers,
    10: RetainedParks,
    13: Halfway,
    16: LaterMoves,
    17: Quotas,
    19: ForgottenDeletions,
    22: DamagedParks,
    25: CutOffs,
}
"""By the remainders of numbers by SELDOM_EVERY, from HARDER_FROM on, before all others."""


def kind_of(number: int) -> type[Feature]:
    """The feature of a seed: in turn, and in some seeds an outbox, or what only consumer groups
    have.
    """
    if number >= HARDER_FROM and (harder := HARDER.get(number % SELDOM_EVERY)) is not None:
        return harder
    if number % SELDOM_EVERY == LACKING_AT:
        return LACKING[number // SELDOM_EVERY % len(LACKING)]
    if (kind := SELDOM.get(number % SELDOM_EVERY)) is not None:
        return kind
    return OTHERS.get(number % OTHERS_EVERY, FEATURES[number % len(FEATURES)])


def _plan(number: int, drawn: Swarm) -> Swarm:
    rng = random.Random(f"features {number}")
    kind = kind_of(number)
    plan = replace(
        drawn,
        faults=(drawn.faults | kind.faults) - kind.never,
        strict=True,
        static=False,
        groups=1,
        consumers=rng.choice((1, 2)),
        producers=1,
        keys=rng.choice((1, 3, 6)),
        messages=rng.choice((10, 30)),
        fault_s=rng.choice((5.0, 8.0)),
        gap_s=rng.choice((0.4, 1.0)),
        manners=drawn.manners | {"by_hand": 0.0},
    )
    return kind.plan(plan, rng)


def feature_plan_of(number: int) -> Swarm:
    """The plan of the world of that number, without the world."""
    return _plan(number, draw(random.Random(STRIDE * number)))


class _Services:
    """The consumer groups of several subjects, as one `Service`."""

    def __init__(self, services: list[Service], feature: Feature) -> None:
        self._services = services
        self._feature = feature
        self.limit_s = max(service.limit_s for service in services)

    @property
    def drained(self) -> bool:
        return all(service.drained for service in self._services)

    @property
    def problems(self) -> dict[Any, str]:
        return {
            (index, who): problem
            for index, service in enumerate(self._services)
            for who, problem in service.problems.items()
        }

    def look(self, now_s: float) -> None:
        for service in self._services:
            service.look(now_s)

    def lost(self, partitions: Iterable[HostedPartition]) -> None:
        lost = list(partitions)
        self._feature.lost(lost)
        for service in self._services:
            service.lost(lost)

    def expect(self, group: str) -> None:
        self._services[0].expect(group)


class FeatureWorld(World):
    """Every host of one such seed."""

    broker_kind = SchedulingBrokerHost
    meta_settings = replace(
        META_SETTINGS, auto_create=f"{MADE}*", auto_create_partitions=PARTITIONS
    )
    is_usual = False

    def __init__(self, seed: int) -> None:
        self.number = seed - FEATURES_FIRST
        self._kind = kind_of(self.number)
        self.hosted: dict[int, HostedPartition] = {}
        """What the brokers' disks have at the end."""
        self.retention = self._kind.retention
        self.drain_s += self._kind.drain_s
        if self._kind.history_speed:
            self.meta_settings = replace(self.meta_settings, history_retention_ms=HISTORY_MS)
        super().__init__(STRIDE * self.number)
        self.seed = STRIDE * self.number
        for meta in self.metas:
            meta.history_speed = self._kind.history_speed
        self.feature = self._kind(self)
        self.feature.build()
        groups = [f"group{index}" for index in range(self.swarm.groups)]
        service: Any = _Services(
            [
                Service(self.brokers, groups, ttl_ms=self.swarm.ttl_ms, subject=SUBJECT),
                *self.feature.services(),
            ],
            self.feature,
        )
        self.service = service

    def _has_copies(self) -> bool:
        return has_copies(self.number) and self._kind.may_have_copies

    def _plan(self, swarm: Swarm) -> Swarm:
        return _plan(self.number, swarm)

    def _add_outboxes(self) -> Outboxes:
        return RelayedOutboxes(self, self._meta, present=self._kind is Relays)

    @property
    def at_rest(self) -> bool:
        return super().at_rest and self.feature.idle

    def add_consumer(
        self, kind: type[ConsumerHost] | None = None, *, group: str = ""
    ) -> ConsumerHost:
        host = super().add_consumer(kind or self._kind.consumer_kind, group=group)
        if "feature" in vars(self):
            self.feature.adopt(host)
        return host

    def _start_deeds(self) -> None:
        self._operator_does(self.feature.work())
        self._start_copying()
        if self.feature.creates and self.swarm.faults & {"cordon", "evacuate"}:
            self._operator_does(self._lift_cordons())

    async def _lift_cordons(self) -> None:
        """
        Let every broker group take new partitions, once all is healed.

        An evacuation leaves its group cordoned, and a lift that no metaserver has heard leaves the
        other one so: no subject is created then until an operator lifts a cordon. What an operator
        began before the healing may cordon after it.
        """
        while not self.faults.healed:
            await asyncio.sleep(CORDONED_S)
        while not self._drained():
            for broker in self.brokers:
                await uncordon(broker.group, self._operator_meta)
            await asyncio.sleep(CORDONED_S)

    def _drained(self) -> bool:
        return super()._drained() and self.feature.drained

    async def live(self) -> float:
        drained_s = await super().live()
        while drained_s >= 0:
            try:
                await self._in_operator(self.feature.look())
                break
            except KeylaneError:
                await asyncio.sleep(0.2)
        return drained_s

    def _read_log(
        self, store: Store, partition_id: int, partition: HostedPartition, removed: Removed
    ) -> None:
        self.hosted[partition_id] = partition
        super()._read_log(store, partition_id, partition, removed)

    def judge(self, drained_s: float) -> Outcome:
        outcome = super().judge(drained_s)
        outcome.seed = FEATURES_FIRST + self.number
        return outcome

    def _check(self) -> Findings:
        self.feature.settle()
        findings = Findings()
        mine = self.partitions_of(SUBJECT)
        hosts = {host.name for host in self.producers if host.subject == SUBJECT}
        hosts |= {host.name for host in self.outboxes.hosts} | {"outbox"}
        view = seen_from(self.history, partitions=mine, hosts=hosts)
        check_view(self.feature.seen(view), findings)
        self.feature.check(findings, self.hosted)
        self.loop.faults += self.feature.problems
        return findings

    def partitions_of(self, subject: str) -> set[int]:
        """The ids of the subject's partitions on the brokers' disks at the end."""
        return {
            partition_id
            for partition_id, partition in self.hosted.items()
            if partition.facts.subject == subject
        }
