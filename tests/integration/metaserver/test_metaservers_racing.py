"""Metaservers as processes of their own, on one database, with concurrent calls of every kind."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import pytest

from keylane.protocol import endpoints
from keylane.protocol.control import CreateSubject, Grants, Heartbeat, Join, Leave, ReleaseGrant
from keylane.protocol.errors import Reason, SessionUnknownError
from keylane.protocol.operations import (
    OperationKind,
    OperationList,
    OperationState,
    OperationView,
    Reshape,
)
from keylane.protocol.routing import route_table
from keylane.rpc.client import MetaClient
from keylane.rpc.http_network import HttpNetwork
from support.brokers.hosting_broker import HostingBroker, hosting_broker
from support.cluster import Program
from support.postgres import Postgres
from support.raising import is_a

PARTITIONS = 6
CONSUMERS = 6
GRANTS_MIN = 3 * PARTITIONS
SECONDS = 4.0
TTL_MS = 1_500
SEED = 4

Held = dict[int, int]
"""Partition id → token."""


class Ledger:
    """The grants that clients were sent, and when, by this process's clock."""

    def __init__(self) -> None:
        self.owner_of: dict[int, set[tuple[str, int]]] = defaultdict(set)
        self._since: dict[tuple[int, int], float] = {}
        self.spans: dict[int, list[tuple[float, float, int]]] = defaultdict(list)

    def granted(self, session: str, partition_id: int, token: int) -> None:
        """An answer says so; it holds from now on."""
        self.owner_of[token].add((session, partition_id))
        self._since.setdefault((partition_id, token), time.monotonic())

    def ended(self, partition_id: int, token: int, at: float) -> None:
        """The holder gave it up at `at`, before its call."""
        start = self._since.pop((partition_id, token), None)
        if start is not None:
            self.spans[partition_id].append((start, at, token))


class Consumer:
    """A client that holds its grants and calls the metaservers in turn."""

    def __init__(self, metas: list[MetaClient], rng: random.Random, ledger: Ledger) -> None:
        self._metas = metas
        self._rng = rng
        self._ledger = ledger
        self.session = ""
        self.held: Held = {}
        self._version = -1
        self._heard = 0.0

    @property
    def _meta(self) -> MetaClient:
        return self._rng.choice(self._metas)

    async def join(self) -> None:
        self.session = f"{self._rng.getrandbits(128):032x}"
        self.held, self._version = {}, -1
        self._heard = time.monotonic()
        await self._meta.call(
            endpoints.JOIN, Join(subject="s", group="g", session=self.session, ttl_ms=TTL_MS)
        )

    async def look(self, wait_ms: int = 100) -> None:
        """Send a heartbeat; take new grants, hand over withdrawn ones."""
        sent = time.monotonic()
        ask = Heartbeat(
            session=self.session,
            known_version=self._version,
            holding=tuple(self.held.items()),
            wait_ms=wait_ms,
        )
        grants: Grants = await self._meta.call(endpoints.HEARTBEAT, ask)
        self._heard = sent
        if grants.version < self._version:
            return
        self._version = grants.version
        now = {grant.partition.partition_id: grant.token for grant in grants.grants}
        for partition_id, token in list(self.held.items()):
            if now.get(partition_id) != token:
                del self.held[partition_id]
                self._ledger.ended(partition_id, token, time.monotonic())
                if self._rng.random() < 0.8:  # else the heartbeat's `holding` says it
                    await self._meta.call(
                        endpoints.RELEASE,
                        ReleaseGrant(session=self.session, partition_id=partition_id, token=token),
                    )
        for partition_id, token in now.items():
            if self.held.get(partition_id) != token:
                self._ledger.granted(self.session, partition_id, token)
                self.held[partition_id] = token

    async def beat(self, wait_ms: int) -> bool:
        """Look; join again if the session has ended, as on a slow machine: False."""
        try:
            await self.look(wait_ms)
        except SessionUnknownError:
            self.fall_silent()
            await self.join()
            return False
        return True

    async def leave(self) -> None:
        self._give_up(time.monotonic())
        await self._meta.call(endpoints.LEAVE, Leave(session=self.session))

    def fall_silent(self) -> None:
        """Crash: its leases run until the ttl after the last heartbeat that was answered."""
        self._give_up(self._heard + TTL_MS / 1000)

    def _give_up(self, at: float) -> None:
        for partition_id, token in self.held.items():
            self._ledger.ended(partition_id, token, at)
        self.held = {}

    async def live(self, until: float) -> None:
        """Join, look, leave or crash, join again, until the time comes and there were grants; then
        stay a member.
        """
        await self.join()
        while time.monotonic() < until or len(self._ledger.owner_of) <= GRANTS_MIN:
            if not await self.beat(self._rng.choice([0, 20, 100])):
                continue
            chance = self._rng.random()
            if chance < 0.10:
                await self.leave()
                await self.join()
            elif chance < 0.14:
                self.fall_silent()
                await self.join()


@asynccontextmanager
async def racing(folder: Path, count: int, *arguments: str) -> AsyncIterator[list[MetaClient]]:
    """Clients of `count` metaserver processes, one for each."""
    programs: list[Program] = []
    network = HttpNetwork()
    try:
        where = ("--data", str(folder / "meta"), *arguments)
        programs = [Program("keylane.metaserver", *where) for _ in range(count)]
        for program in programs:
            program.ready()
        yield [MetaClient(network, [program.address], timeout_ms=20_000) for program in programs]
    finally:
        await network.close()
        for program in programs:
            program.stop()


async def report_for_ever(metas: list[MetaClient], broker: HostingBroker) -> None:
    while True:
        for meta in metas:
            await broker.report(meta)
        await asyncio.sleep(0.2)


@dataclass(frozen=True, kw_only=True)
class Race:
    """The clients that take part."""

    metas: list[MetaClient]
    brokers: list[HostingBroker]


@pytest.fixture
def metas(race: Race) -> list[MetaClient]:
    return race.metas


@pytest.fixture(
    params=["sqlite-2", pytest.param("postgresql-2", marks=pytest.mark.whole), "postgresql-3"]
)
async def race(
    request: pytest.FixtureRequest, tmp_path: Path, postgres: Postgres
) -> AsyncIterator[Race]:
    kind, count = request.param.split("-")
    arguments = ["--database-url", postgres.url()] if kind == "postgresql" else []
    before = deadlocks(postgres)
    async with AsyncExitStack() as stack:
        metas = await stack.enter_async_context(racing(tmp_path, int(count), *arguments))
        brokers = [
            await stack.enter_async_context(hosting_broker(metas[0], name))
            for name in ("left", "right")
        ]
        reporting = [asyncio.create_task(report_for_ever(metas, broker)) for broker in brokers]
        yield Race(metas=metas, brokers=brokers)
        for task in reporting:
            assert not task.done() or task.exception() is None
            task.cancel()
    assert deadlocks(postgres) == before, "transactions lock rows in different orders"


def deadlocks(postgres: Postgres) -> int:
    (row,) = postgres.execute("SELECT sum(deadlocks)::int FROM pg_stat_database")
    return row[0]


async def test_tokens_have_one_owner_and_partitions_one_holder(metas: list[MetaClient]) -> None:
    """Under joins, hand-overs, leaves and crashes at several metaservers."""
    await metas[0].create_subject(CreateSubject(subject="s", partitions=PARTITIONS))
    ledger = Ledger()
    rng = random.Random(SEED)
    consumers = [
        Consumer(metas, random.Random(rng.getrandbits(64)), ledger) for _ in range(CONSUMERS)
    ]
    until = time.monotonic() + SECONDS
    async with asyncio.TaskGroup() as group:
        for consumer in consumers:
            group.create_task(consumer.live(until))
    await settle(consumers)
    for consumer in consumers:
        await consumer.leave()

    assert all(len(owners) == 1 for owners in ledger.owner_of.values())
    assert len(ledger.owner_of) > GRANTS_MIN
    assert len(ledger.spans) == PARTITIONS
    for spans in ledger.spans.values():
        spans.sort()
        for (_, end, token), (start, _, later) in pairwise(spans):
            assert token < later
            assert end <= start


async def settle(consumers: list[Consumer]) -> None:
    """All send heartbeats until each partition is held once and shares differ by at most one."""
    until = time.monotonic() + 60
    while True:
        await asyncio.gather(*(consumer.beat(50) for consumer in consumers))
        held = Counter(partition_id for consumer in consumers for partition_id in consumer.held)
        shares = [len(consumer.held) for consumer in consumers]
        if len(held) == PARTITIONS and max(shares) - min(shares) <= 1:
            assert set(held.values()) == {1}
            return
        assert time.monotonic() < until, (held, shares)


async def test_subject_is_created_once_by_concurrent_calls(metas: list[MetaClient]) -> None:
    """Operators at every metaserver create the same subjects at once: one of each; other settings
    are refused.
    """
    names = [f"s{number}" for number in range(4)]
    asked = [
        meta.create_subject(CreateSubject(subject=name, partitions=4))
        for name in names
        for meta in metas
        for _ in range(3)
    ]
    views = await asyncio.gather(*asked)
    assert len({view.route.partitions for view in views}) == len(names)
    for view in views:
        assert len(route_table(view.route)) == 1024

    both = [CreateSubject(subject="t", partitions=2), CreateSubject(subject="t", partitions=3)]
    answers = await asyncio.gather(
        *(meta.create_subject(ask) for meta in metas for ask in both for _ in range(3)),
        return_exceptions=True,
    )
    refused = [answer for answer in answers if isinstance(answer, BaseException)]
    assert {error.reason for error in refused} == {Reason.SUBJECT_EXISTS}
    stored = (await metas[0].call(endpoints.SUBJECT, subject="t")).route
    assert {
        answer.route.partitions for answer in answers if not isinstance(answer, BaseException)
    } == {stored.partitions}
    assert {partition.name for partition in stored.partitions} in (
        {"t.p0", "t.p1"},
        {"t.p0", "t.p1", "t.p2"},
    )


async def test_change_at_one_metaserver_wakes_a_long_poll_at_another(
    metas: list[MetaClient],
) -> None:
    """The long poll is answered at the next poll of its metaserver, not at its end."""
    await metas[0].create_subject(CreateSubject(subject="s", partitions=2))
    first, second = "a" * 16, "b" * 16
    await metas[0].call(endpoints.JOIN, Join(subject="s", group="g", session=first))
    before = await metas[0].call(endpoints.HEARTBEAT, Heartbeat(session=first))
    waits = []
    for meta in metas[1:]:
        for change in (
            meta.call(endpoints.JOIN, Join(subject="s", group="g", session=second)),
            meta.call(endpoints.LEAVE, Leave(session=second)),
        ):
            ask = Heartbeat(session=first, known_version=before.version, wait_ms=9_000)
            polling = asyncio.create_task(metas[0].call(endpoints.HEARTBEAT, ask))
            await asyncio.sleep(0.1)
            start = time.monotonic()
            await change
            after = await polling
            waits.append(time.monotonic() - start)
            for gone in set(before.grants) - set(after.grants):
                await metas[0].call(
                    endpoints.RELEASE,
                    ReleaseGrant(
                        session=first, partition_id=gone.partition.partition_id, token=gone.token
                    ),
                )
            before = after
        assert len(before.grants) == 2
    assert max(waits) < 4.5  # it looks each half second; the poll itself would end after nine


async def test_operations_on_a_subject_exclude_each_other(race: Race) -> None:
    """Resizes, evacuations and cancels at every metaserver at once: one operation runs on a
    subject, who comes second is refused by type, every operation comes to its end, and the database
    and the brokers agree.
    """
    metas, names = race.metas, ["s0", "s1", "s2"]
    for name in names:
        await metas[0].create_subject(CreateSubject(subject=name, partitions=4))
    for broker in race.brokers:
        broker.refuse_after = 0  # so that nothing leaves PLAN
    first = await at_once(race, names, [6, 7, 8])
    running = {view.subject: view.operation_id for view in first if view.operation_id}
    assert running.keys() == set(names)
    assert {view.operation_id for view in first} == set(running.values()), "two on one subject"

    canceling = [
        meta.call(endpoints.CANCEL_OPERATION, id=operation_id)
        for operation_id in running.values()
        for meta in metas
        for _ in range(2)
    ]
    canceled, second = await asyncio.gather(asyncio.gather(*canceling), at_once(race, names, [9]))
    assert {view.state for view in canceled} == {OperationState.CANCELED}
    assert {view.operation_id for view in second}.isdisjoint(running.values())
    for subject in names:
        assert len({view.operation_id for view in second if view.subject == subject}) <= 1

    for broker in race.brokers:
        broker.refuse_after = None
    rng = random.Random(SEED)
    for _ in range(4):
        begun = await at_once(race, names, rng.sample(range(1, 12), 3))
        cancels = [
            rng.choice(metas).call(endpoints.CANCEL_OPERATION, id=view.operation_id)
            for view in begun
            if view.operation_id
        ]
        for answer in await asyncio.gather(*cancels, return_exceptions=True):
            assert isinstance(answer, OperationView) or is_a(answer, Reason.OPERATION_FORWARD), (
                answer
            )
    for name in names:
        await ended(metas[0], name)
    verification = await metas[-1].call(endpoints.VERIFY)
    assert [check for check in verification.checks if check.violations] == []


async def at_once(race: Race, names: list[str], counts: list[int]) -> list[OperationView]:
    """Resizes of each subject to all these counts and an evacuation, at every metaserver: what was
    begun.
    """
    asks = [
        Reshape(kind=OperationKind.RESIZE, subject=name, partitions=count)
        for count in counts
        for name in names
    ]
    source = race.brokers[0].broker_group
    asks.insert(len(asks) // 2, Reshape(kind=OperationKind.EVACUATE, broker_group=source))
    answers = await asyncio.gather(
        *(meta.call(endpoints.RESHAPE, ask) for ask in asks for meta in race.metas),
        return_exceptions=True,
    )
    refused = [answer for answer in answers if isinstance(answer, BaseException)]
    assert {error.reason for error in refused} <= {Reason.OPERATION_RUNNING}, refused
    return [
        view
        for answer in answers
        if isinstance(answer, OperationList)
        for view in answer.operations
    ]


async def ended(meta: MetaClient, subject: str) -> None:
    """Every operation on a subject is done, or canceled and its children sealed."""
    until = time.monotonic() + 60
    while True:
        views = (await meta.call(endpoints.OPERATIONS, subject=subject)).operations
        if all(
            view.state in {OperationState.DONE, OperationState.CANCELED}
            and all(step.done for step in view.steps)
            for view in views
        ):
            return
        assert time.monotonic() < until, views
        await asyncio.sleep(0.05)
