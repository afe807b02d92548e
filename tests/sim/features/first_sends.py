"""Several producers send the first messages of a subject that is not created yet, while metaservers
die: it is one.
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace
from itertools import pairwise
from typing import Any

from keylane.broker.partition.partition import HostedPartition
from keylane.checker.findings import Findings
from keylane.producer.client import Producer
from keylane.protocol.limits import LOGICAL_PARTITIONS
from sim.actors.clients import ProducerHost
from sim.features.feature import Feature
from sim.features.views import check_view, seen_from
from sim.swarm import Swarm

MADE = "made."
"""How the names begin of subjects that their first messages create."""
PARTITIONS = 3
SUBJECTS = 3
SENDERS = 3


class FirstProducer(ProducerHost):
    """Sends to a subject of its own, from a moment on that it shares with others."""

    begins_s = 0.0
    ids: set[int]
    """What the routes that it follows say of the subject; shared with the other senders."""

    async def _send_all(self, producer: Producer, count: int) -> None:
        await asyncio.sleep(max(0.0, self.begins_s - self.loop.now))
        await super()._send_all(producer, min(count, 8))

    def burst(self) -> None:
        """The moment is chosen."""

    def _watch_routes(self, producer: Producer, name: str) -> None:
        super()._watch_routes(producer, name)
        if self._route is not None:
            self.ids.add(self._route.subject_id)


class FirstSends(Feature):
    """See the module."""

    faults = frozenset({"meta_crash", "meta_commit", "broker_crash"})
    creates = True

    @classmethod
    def plan(cls, swarm: Swarm, rng: random.Random) -> Swarm:
        return replace(swarm, metaservers=rng.choice((1, 2)), fault_s=6.0, gap_s=0.3)

    def build(self) -> None:
        self._ids: dict[str, set[int]] = {}
        self._members: dict[str, set[int]] = {}
        """The partitions in the route of each subject."""
        for number in range(SUBJECTS):
            subject = f"{MADE}{number}"
            ids = self._ids[subject] = set()
            begins_s = 0.5 + (2.0 * number + self.rng.random() if number else 0.0)
            for sender in range(SENDERS):
                host = self.add_producer(FirstProducer, f"f{number}{'abc'[sender]}")
                assert isinstance(host, FirstProducer)
                host.subject, host.ids, host.begins_s = subject, ids, begins_s

    async def look(self) -> None:
        for subject in self._ids:
            route = await self.world._operator_meta.route(subject)
            self._members[subject] = {int(each.partition_id) for each in route.partitions}

    def check(self, findings: Findings, hosted: dict[int, HostedPartition]) -> None:
        for subject, ids in self._ids.items():
            mine = self.world.partitions_of(subject)
            hosts = {host.name for host in self.world.producers if host.subject == subject}
            check_view(seen_from(self.world.history, partitions=mine, hosts=hosts), findings)
            if len(ids) > 1:
                self.problems.append(f"{subject} was several subjects: {sorted(ids)}")
            if subject in self._members:  # else it has starved, and no route was asked for
                members = self._members[subject]
                self.problems += pieces({each: hosted[each] for each in mine}, members, subject)


def pieces(hosted: dict[int, HostedPartition], members: set[int], subject: str) -> list[str]:
    """
    What is wrong with a subject's partitions.

    Those of its route that continue no others are PARTITIONS, and cover all keys once. What a
    broker was asked to host before the creation went to another one is in no route, and has no
    messages.
    """
    roots: list[Any] = [
        partition.facts.partition
        for number, partition in hosted.items()
        if number in members and not partition.facts.partition.parents
    ]
    edges = sorted((facts.range_start, facts.range_end) for facts in roots)
    ends = [number * LOGICAL_PARTITIONS // PARTITIONS for number in range(PARTITIONS + 1)]
    problems = []
    if edges != list(pairwise(ends)):
        problems.append(f"{subject} has the first partitions {edges}")
    for number, partition in hosted.items():
        if number not in members and partition.next_offset:
            problems.append(f"partition {number} of {subject} has messages, and is in no route")
    return problems
