"""A subject and its consumer group are deleted while programs use them, and created anew under the
same names.

One life of the subject lasts from its creation to the moment at which its deletion is asked for.
Programs are frozen through deletions, and wake up beside the next life.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from keylane.broker.partition.partition import HostedPartition
from keylane.checker.events import (
    Dropped,
    Ended,
    Event,
    Granted,
    LeaseReleased,
    LeasesReported,
    Recovered,
    Routed,
    Sent,
    Served,
    Settled,
    Started,
)
from keylane.checker.findings import Findings
from keylane.consumer.client import Consumer
from keylane.producer.client import Producer
from keylane.protocol import endpoints
from keylane.protocol.control import CreateSubject, DeleteGroup, DeleteSubject
from keylane.protocol.errors import (
    GroupDeletedError,
    GroupUnknownError,
    KeylaneError,
    SubjectDeletedError,
    SubjectUnknownError,
)
from sim.actors.clients import ProducerHost
from sim.actors.consumers import ConsumerHost
from sim.actors.hosts import Host
from sim.features.feature import Feature
from sim.features.views import check_view, seen_from
from sim.service import Service
from sim.swarm import Swarm

DOOMED = "doomed"
GROUP = "readers"
GONE = (GroupDeletedError, GroupUnknownError, SubjectDeletedError, SubjectUnknownError)


class DoomedProducer(ProducerHost):
    """Sends to the subject, in all its lives, until it is told that the last one has begun."""

    subject = DOOMED
    gives_up = (*ProducerHost.gives_up, *GONE)
    last = False

    async def _send_all(self, producer: Producer, count: int) -> None:
        rng = self.rng
        while not self.last and not (self._closing and self._producer is not None):
            await self._send(producer, rng.choice((1, 1, 2, 5)))
            await asyncio.sleep(0.05 + 0.4 * rng.random())
        if not self._closing:
            await self._send(producer, 3)


class DoomedConsumer(ConsumerHost):
    """Consumes the subject; when subject or group is gone, it begins again."""

    subject = DOOMED

    async def _live(self, consumer: Consumer) -> None:
        while True:
            try:
                await super()._live(consumer)
                return
            except GONE:
                self.consumer = None
                await consumer.close()
                await asyncio.sleep(0.3 * self.rng.random())


@dataclass
class Life:
    """One life of the subject."""

    partitions: frozenset[int]
    ended: float = float("inf")
    """The instant at which its deletion is asked for."""


class Deletions(Feature):
    """See the module."""

    faults = frozenset({"broker_crash", "meta_crash"})
    creates = True
    never = frozenset({"evacuate"})  # a life has the partitions of its creation

    @classmethod
    def plan(cls, swarm: Swarm, rng: Any) -> Swarm:
        return replace(swarm, fault_s=8.0)

    def build(self) -> None:
        rng = self.rng
        self.lives: list[Life] = []
        self._count = rng.choice((1, 2, 3))
        self._producers = [self.add_producer(DoomedProducer, f"d{n}") for n in range(2)]
        self._consumers = [
            self.world.add_consumer(DoomedConsumer, group=GROUP) for _ in range(rng.choice((1, 2)))
        ]
        self._hosts: list[Host] = [*self._producers, *self._consumers]

    def services(self) -> list[Service]:
        ttl_ms = self.world.swarm.ttl_ms
        return [Service(self.world.brokers, [GROUP], ttl_ms=ttl_ms, subject=DOOMED)]

    # ── deeds ─────────────────────────────────────────────────────────────────────────────────────
    async def work(self) -> None:
        """Delete and create, one after the other."""
        self.idle = False
        await self._create()
        while not self.world.faults.healed:
            await self.pause(2.0)
            frozen = [host for host in self._hosts if host.running and self.rng.random() < 0.3]
            for host in frozen:
                host.process.paused = True
            if self.rng.random() < 0.65:
                await self._delete_subject()
                await self.pause(0.5)
                await self._create()
            else:
                await self._delete_group()
            for host in frozen:
                self.world.loop.after(self.rng.random(), self.world.loop.resume, host.process)
        for producer in self._producers:
            producer.last = True  # type: ignore[attr-defined]
        self.idle = True

    async def _create(self) -> None:
        ask = CreateSubject(subject=DOOMED, partitions=self._count)
        while True:
            try:
                await self.world._operator_meta.create_subject(ask)
                route = await self.world._operator_meta.route(DOOMED)
                break
            except KeylaneError as error:
                self.world.trace(f"doomed is not created: {error!r}")
                await asyncio.sleep(0.2)
        ids = frozenset(int(partition.partition_id) for partition in route.partitions)
        for life in self.lives:
            if used := life.partitions & ids:
                self.problems.append(f"partition ids {sorted(used)} are used again")
        self._subject_id = route.subject_id
        self.lives.append(Life(ids))
        self.world.trace(f"doomed lives: {route!r}")

    async def _delete_subject(self) -> None:
        self.world.faults.done += 1
        self.lives[-1].ended = len(self.world.history)
        ask = DeleteSubject(force=True, subject_id=self._subject_id)
        asked_s = self.world.loop.now
        while True:
            try:
                view = await self.world._operator_meta.call(
                    endpoints.DELETE_SUBJECT, ask, subject=DOOMED
                )
                if not view.left:
                    return
            except SubjectUnknownError:
                if not self.may_be_forgotten(asked_s):
                    self.problems.append("a deletion that has ended is not known any more")
                return
            except KeylaneError as error:
                self.world.trace(f"doomed is not deleted: {error!r}")
            await asyncio.sleep(0.2)

    async def _delete_group(self) -> None:
        """Delete the group once; consumers that are back begin the next one."""
        self.world.faults.done += 1
        group_id = 0
        while True:
            try:
                ask = DeleteGroup(force=True, group_id=group_id)
                view = await self.world._operator_meta.call(
                    endpoints.DELETE_GROUP, ask, subject=DOOMED, group=GROUP
                )
                group_id = view.group_id
                if not view.left:
                    return
            except GroupUnknownError:
                return  # no consumer has come yet, or the first answer was lost
            except KeylaneError as error:
                self.world.trace(f"{GROUP} is not deleted: {error!r}")
            await asyncio.sleep(0.2)

    # ── the judge ─────────────────────────────────────────────────────────────────────────────────
    def check(self, findings: Findings, hosted: dict[int, HostedPartition]) -> None:
        if not self.lives:
            return
        mine, last = self.world.partitions_of(DOOMED), self.lives[-1].partitions
        # Above are ids of the last creation alone: those of its route, and those that it planned
        # anew elsewhere.
        highest = max((max(life.partitions) for life in self.lives[:-1]), default=0)
        for number in sorted(mine - last):
            if number <= highest:
                self.problems.append(f"partition {number} of a deleted subject is still hosted")
            elif hosted[number].next_offset:
                self.problems.append(f"partition {number} has messages, and is in no route")
        history = self.world.history
        owners = owners_of(history, self.lives)
        self.problems += mixed_up(history, self.lives, owners)
        hosts = {host.name for host in self._producers}
        seen = [
            None if _is_of_before(event, owners, self.lives) else event
            for event in seen_from(history, partitions=last, hosts=hosts)
        ]
        check_groups(seen, findings)


def life_of(lives: Sequence[Life], partition_id: int) -> int | None:
    """The number of the life that has a partition; None: no creation had it."""
    for number, life in enumerate(lives):
        if partition_id in life.partitions:
            return number
    return None


def owners_of(history: Sequence[Event], lives: Sequence[Life]) -> dict[Any, int]:
    """
    The messages that belong to one life, and to no other.

    One that is acked belongs to the life of its partition. So does one that was sent before the
    deletion was asked for, if its sender had an ack of that life, and no error since.
    """
    owners: dict[Any, int] = {}
    bound: dict[str, int] = {}
    senders: dict[Any, str] = {}
    for now, event in enumerate(history):
        if isinstance(event, Sent):
            senders[event.value] = event.producer
            life = bound.get(event.producer)
            if life is not None and now < lives[life].ended:
                owners[event.value] = life
        elif isinstance(event, Settled) and event.value in senders:
            life = life_of(lives, event.partition_id) if event.outcome == "stored" else None
            if life is None:
                bound.pop(senders[event.value], None)
            else:
                bound[senders[event.value]] = life
                owners.setdefault(event.value, life)
    return owners


def mixed_up(history: Sequence[Event], lives: Sequence[Life], owners: dict[Any, int]) -> list[str]:
    """Messages of one life that were stored or handled in another, and sessions that consume two
    lives.
    """
    problems: list[str] = []
    sessions: dict[str, int] = {}
    for event in history:
        if not isinstance(event, Started | Settled) or event.value not in owners:
            continue
        if isinstance(event, Settled) and event.outcome != "stored":
            continue
        life = life_of(lives, event.partition_id)
        if life != owners[event.value]:
            said = (
                f"{event.value!r} of life {owners[event.value]} is in partition "
                f"{event.partition_id}"
            )
            problems.append(f"{said} of life {life}")
        if isinstance(event, Started) and sessions.setdefault(event.session, life or 0) != life:
            problems.append(f"session {event.session[:8]} consumes two lives")
    return problems[:5]


def _is_of_before(event: Any, owners: dict[Any, int], lives: Sequence[Life]) -> bool:
    """Whether it is about sending a message that belongs to an earlier life; routes begin anew with
    each life.
    """
    if isinstance(event, Routed):
        return True
    return isinstance(event, Sent | Settled) and owners.get(event.value, len(lives) - 1) < (
        len(lives) - 1
    )


def check_groups(seen: Sequence[Any], findings: Findings) -> None:
    """
    Judge the groups that had the name, each as one of its own: the last of them has to be through
    with everything.

    The database's ids of groups tell them apart; brokers know the name and the tokens only.
    """
    of_session: defaultdict[str, set[int]] = defaultdict(set)
    of_token: defaultdict[tuple[int, int], set[int]] = defaultdict(set)
    for event in seen:
        if isinstance(event, Granted):
            of_session[event.session].add(event.group_id)
            of_token[event.partition_id, event.token].add(event.group_id)
    for (partition_id, token), groups in of_token.items():
        if len(groups) > 1:
            findings.note("duplicate token", f"{token} on {partition_id} of groups {groups}")

    def groups_of(event: Any) -> set[int] | None:
        """Ids of the groups that the event concerns; None: all. A session that joins again may be
        of several groups.
        """
        match event:
            case Granted():
                return {event.group_id}
            case Served() | Recovered():
                return {min(of_token.get((event.partition_id, event.token), {-1}))}
            case Started() | Ended() | LeaseReleased():
                known = of_token.get((event.partition_id, event.token), set())
                return known & of_session[event.session] or of_session[event.session]
            case Dropped() | LeasesReported():
                return of_session[event.session]
            case _:
                return None

    concerned = [groups_of(event) for event in seen]
    ids = sorted(set().union(*of_session.values()))
    for group_id in ids or [0]:
        last = group_id == max(ids, default=0)
        events = [
            (event if last else _ended_by_force(event)) if of is None or group_id in of else None
            for event, of in zip(seen, concerned, strict=True)
        ]
        check_view(events, findings, drained=last)


def _ended_by_force(event: Any) -> Any:
    """A deletion ends sessions at once; handlers begin until their consumer has heard of it."""
    return event._replace(session_left_ms=None) if isinstance(event, Started) else event
