"""Ownership and bad input: tokens of the future, dead sessions, clocks that run backwards."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest
import sqlalchemy as sa

from keylane import Consumer, Message, Producer
from keylane.broker.partition.pull_lock import (
    PullLock,
    check_holder,
    decide_acquire,
    grant_lock,
    raise_fence,
)
from keylane.metaserver.cluster.brokers import store_report
from keylane.metaserver.cluster.subjects import open_subject, plan_subject
from keylane.metaserver.groups.lease_rows import read_grants
from keylane.metaserver.groups.sessions import join_group, renew_sessions
from keylane.metaserver.sql.database import SqlDatabase, open_database
from keylane.metaserver.sql.schema import leases
from keylane.protocol import endpoints
from keylane.protocol.control import (
    BrokerHeartbeat,
    CreateSubject,
    Heartbeat,
    Join,
    ReleaseGrant,
)
from keylane.protocol.errors import FencedError, Reason, SessionUnknownError, TokenUnknownError
from keylane.protocol.frames import Ack, Acquire, Pull, Release
from keylane.protocol.limits import TOKEN_STEP_MAX
from keylane.rpc.client import BrokerClient, MetaClient
from keylane.rpc.http_network import HttpNetwork
from sim.machines.clock import ManualClock
from support.cluster import Cluster, eventually
from support.sql.told_groups import settle_group

A, B = "a" * 16, "b" * 16
DEAD, LIVE = "d" * 16, "e" * 16
HOUR_MS = 3_600_000


async def test_requests_are_refused_when_their_token_is_above_the_fence(
    shared_cluster: Cluster,
) -> None:
    """Requests under a token above the fence, and one far above it as a new fence, are refused;
    nothing changes.
    """
    route = await shared_cluster.create("future", partitions=1)
    async with Producer(shared_cluster.meta) as producer:
        await producer.send("future", b"one", key=b"k")
    network = HttpNetwork()
    meta = MetaClient(network, [shared_cluster.meta])
    (partition,) = route.partitions
    partition_id = partition.partition_id
    broker = BrokerClient(network, partition.address)
    await meta.call(endpoints.JOIN, Join(subject="future", group="g", session=A))
    (granted,) = (await meta.call(endpoints.HEARTBEAT, Heartbeat(session=A))).grants
    token = granted.token
    await broker.call(Acquire(partition_id, "g", A, token, 30_000))
    before = await broker.control(endpoints.PARTITION, id=partition_id)
    for future in (token + 1, 2**63 - 1):
        for request in (
            Pull(partition_id, "g", A, future, 0, 1 << 20, 0),
            Ack(partition_id, "g", A, future, ((0, 1),)),
            Release(partition_id, "g", A, future),
        ):
            with pytest.raises(TokenUnknownError):
                await broker.call(request)
        with pytest.raises(TokenUnknownError):
            await meta.call(
                endpoints.RELEASE, ReleaseGrant(session=A, partition_id=partition_id, token=future)
            )
    for future in (token + TOKEN_STEP_MAX + 1, 2**63 - 1):
        with pytest.raises(TokenUnknownError):
            await broker.call(Acquire(partition_id, "g", A, future, 30_000))
    assert (await broker.control(endpoints.PARTITION, id=partition_id)).groups == before.groups
    assert (await meta.call(endpoints.HEARTBEAT, Heartbeat(session=A))).grants == (granted,)
    await broker.call(Ack(partition_id, "g", A, token, ((0, 1),)))
    await broker.close()
    await network.close()


async def test_metaserver_catches_up_when_a_fence_is_above_its_tokens(
    shared_cluster: Cluster,
) -> None:
    """A fence above every token granted, as after a database was restored from a copy, stops a
    group for a moment.
    """
    route = await shared_cluster.create("behind", partitions=1)
    (partition,) = route.partitions
    handled: list[Message] = []
    network = HttpNetwork()
    broker = BrokerClient(network, partition.address)
    async with Producer(shared_cluster.meta) as producer:
        async with Consumer(
            shared_cluster.meta, subject="behind", group="g", handler=handled.append
        ):
            await producer.send("behind", b"one", key=b"k")
            await eventually(lambda: len(handled) == 1)
            fence = handled[0].fencing_token + 1_000
            await broker.call(Acquire(partition.partition_id, "g", A, fence, 1_000))
            await producer.send("behind", b"two", key=b"k")
            await eventually(lambda: handled[-1].value == b"two")
    # Once fenced, once more than the fence: not a long way up in small steps.
    assert fence < handled[-1].fencing_token < fence + 10
    await broker.close()
    await network.close()


async def test_heartbeat_is_refused_when_the_session_has_ended(shared_cluster: Cluster) -> None:
    """A session whose ttl has passed cannot renew, report or release anything, and is not brought
    back by trying.
    """
    await shared_cluster.create("dead", partitions=2)
    network = HttpNetwork()
    meta = MetaClient(network, [shared_cluster.meta])
    await meta.call(endpoints.JOIN, Join(subject="dead", group="g", session=DEAD, ttl_ms=1_000))
    held = (await meta.call(endpoints.HEARTBEAT, Heartbeat(session=DEAD))).grants
    await meta.call(endpoints.JOIN, Join(subject="dead", group="g", session=LIVE, ttl_ms=30_000))
    known = -1
    until = time.monotonic() + 60
    while True:
        grants = await meta.call(
            endpoints.HEARTBEAT, Heartbeat(session=LIVE, known_version=known, wait_ms=1_000)
        )
        known = grants.version
        if len(grants.grants) == 2:
            break
        assert time.monotonic() < until
    ids = [grant.partition.partition_id for grant in held]
    for ask in (
        Heartbeat(session=DEAD),
        Heartbeat(session=DEAD, known_version=10**9, wait_ms=1_000),
        Heartbeat(session=DEAD, drained=tuple(ids)),
        Heartbeat(session=DEAD, holding=()),
    ):
        with pytest.raises(SessionUnknownError):
            await meta.call(endpoints.HEARTBEAT, ask)
    for grant in held:
        with pytest.raises(SessionUnknownError):
            await meta.call(
                endpoints.RELEASE,
                ReleaseGrant(
                    session=DEAD, partition_id=grant.partition.partition_id, token=grant.token
                ),
            )
    view = await meta.call(endpoints.GROUP, subject="dead", group="g")
    assert view.sessions == 1
    assert {owner.session for owner in view.owners} == {LIVE}
    assert (await meta.call(endpoints.HEARTBEAT, Heartbeat(session=LIVE))).grants == grants.grants
    await network.close()


async def held_by(database: SqlDatabase) -> dict[int, tuple[str | None, int]]:
    """Partition id → session and token."""

    def read(connection: sa.Connection) -> dict[int, tuple[str | None, int]]:
        rows = connection.execute(sa.select(leases))
        return {row.partition_id: (row.session, row.token) for row in rows}

    return await database.read(read)


async def test_leases_do_not_end_early_when_the_database_clock_runs_backwards(
    tmp_path: Path,
) -> None:
    """An hour back: no lease ends early, no token is granted twice, and a swept session stays
    dead.
    """
    clock = ManualClock(10 * HOUR_MS)
    async with open_database(
        folder=tmp_path, url=None, clock=clock, boot="one", broker_ttl_ms=10_000
    ) as database:
        report = BrokerHeartbeat(broker_group="b", broker_id="x", address="b:1")
        await database.write(store_report, report, ttl_ms=10_000)
        await database.write(plan_subject, CreateSubject(subject="s", partitions=2), subjects_max=9)
        await database.write(open_subject, "s")
        ask = Join(subject="s", group="g", session=A, ttl_ms=5_000)
        group_id = (await database.write(join_group, ask, sessions_max=9)).group_id
        await database.write(settle_group, group_id)
        first = await held_by(database)
        assert {session for session, _ in first.values()} == {A}

        clock.advance(-HOUR_MS)
        other = Join(subject="s", group="g", session=B, ttl_ms=5_000)
        await database.write(join_group, other, sessions_max=9)
        await database.write(settle_group, group_id)
        assert await held_by(database) == first
        assert set(await database.renew(renew_sessions, [A, B])) == {A, B}

        clock.advance(5_001)
        await database.write(settle_group, group_id)
        assert {session for session, _ in (await held_by(database)).values()} == {None}
        clock.advance(-HOUR_MS)
        assert await database.renew(renew_sessions, [A, B]) == {}
        with pytest.raises(SessionUnknownError):
            await database.read(read_grants, A)

        again = Join(subject="s", group="g", session="c" * 16, ttl_ms=5_000)
        await database.write(join_group, again, sessions_max=9)
        await database.write(settle_group, group_id)
        last = await held_by(database)
        assert min(token for _, token in last.values()) > max(token for _, token in first.values())


def test_fence_stays_when_the_broker_clock_runs_backwards() -> None:
    """The lock may seem to live longer, the fence does not move: the older owner stays out, a newer
    gets in.
    """
    lock = PullLock()
    raise_fence(lock, token=4, session=A)
    grant_lock(lock, ttl_ms=1_000, now_ms=HOUR_MS)
    raise_fence(lock, token=5, session=B)
    grant_lock(lock, ttl_ms=1_000, now_ms=0)
    assert lock.holder_at(-HOUR_MS) == B
    check_holder(lock, token=5, session=B)
    with pytest.raises(FencedError):
        check_holder(lock, token=4, session=A)
    assert decide_acquire(lock, token=6, session=A, ttl_ms=1_000)


async def test_creation_is_refused_when_two_operators_create_a_subject_at_once(
    shared_cluster: Cluster,
) -> None:
    """Two creations of one name with different settings: one stands, the other is refused, nothing
    is mixed.
    """
    network = HttpNetwork()
    meta = MetaClient(network, [shared_cluster.meta])
    await shared_cluster.create("before", partitions=1)
    asked = [CreateSubject(subject="both", partitions=count) for count in (2, 3)]
    answers = await asyncio.gather(
        *(meta.create_subject(body) for body in asked), return_exceptions=True
    )
    made = [answer for answer in answers if not isinstance(answer, BaseException)]
    refused = [answer for answer in answers if isinstance(answer, BaseException)]
    assert [answer.reason for answer in refused] == [Reason.SUBJECT_EXISTS]
    assert (await meta.call(endpoints.SUBJECT, subject="both")).route.partitions == made[
        0
    ].route.partitions
    assert len(made[0].route.partitions) in {2, 3}
    await network.close()
