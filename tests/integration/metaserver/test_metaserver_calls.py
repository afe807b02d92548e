"""A metaserver over a real socket: every call, with good and bad input."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest
from msgspec.structs import replace

from keylane.protocol import endpoints
from keylane.protocol.control import (
    BrokerHeartbeat,
    CreateSubject,
    Grants,
    Heartbeat,
    Join,
    Leave,
    ReleaseGrant,
    Retention,
    SwitchGroup,
)
from keylane.protocol.errors import (
    FlushFailedError,
    GroupUnknownError,
    InternalError,
    InvalidRequestError,
    KeylaneError,
    Reason,
    SessionUnknownError,
    SubjectUnknownError,
    TokenUnknownError,
)
from keylane.protocol.http.bodies import encode_json
from keylane.protocol.membership.versions import VERSION
from keylane.protocol.operations import Cordon, OperationKind, Reshape
from keylane.protocol.routing import (
    ConsumeStrategy,
    OrderStrategy,
    PartitionState,
    route_table,
    split_ranges,
)
from support.brokers.hosting_broker import MetaAndBroker, hosting_broker, running_house
from support.raising import raises

A = "a" * 16
B = "b" * 16
C = "c" * 16


@pytest.fixture
async def house(tmp_path: Path, database: dict[str, str]) -> AsyncIterator[MetaAndBroker]:
    async with running_house(tmp_path, **database) as running:
        yield running


def held(grants: Grants) -> dict[int, int]:
    """Partition id to token."""
    return {grant.partition.partition_id: grant.token for grant in grants.grants}


async def test_subject_is_spread_over_brokers(house: MetaAndBroker) -> None:
    """A new subject has exact ranges, spread evenly over the available broker groups, each hosted
    there.
    """
    async with hosting_broker(house.meta, "right") as right:
        made = await house.meta.create_subject(CreateSubject(subject="flights", partitions=4))
        route = made.route
        assert route.version == 1
        assert [
            (partition.range_start, partition.range_end) for partition in route.partitions
        ] == split_ranges(4)
        assert [partition.queue for partition in route.partitions] == [0, 1, 2, 3]
        assert len(route_table(route)) == 1024
        assert len({partition.name for partition in route.partitions}) == 4
        for broker in (house.broker, right):
            mine = [
                partition
                for partition in route.partitions
                if partition.broker_group == broker.broker_group
            ]
            assert {partition.address for partition in mine} == {broker.address}
            assert broker.hosted == {partition.partition_id: partition for partition in mine}
            assert len(mine) == 2
        again = await house.meta.create_subject(CreateSubject(subject="flights", partitions=4))
        assert again == made == await house.meta.call(endpoints.SUBJECT, subject="flights")
        listed = (await house.meta.call(endpoints.SUBJECTS)).subjects
        assert [
            (summary.subject, summary.partitions, summary.route_version) for summary in listed
        ] == [("flights", 4, 1)]


async def test_consumers_share_hand_over_and_leave(house: MetaAndBroker) -> None:
    """Partitions are shared; a hand-over is granted with a higher token only after its release."""
    await house.meta.create_subject(CreateSubject(subject="s", partitions=4))
    joined = await house.meta.call(
        endpoints.JOIN, Join(subject="s", group="g", session=A, client="one")
    )
    assert (joined.ttl_ms, joined.heartbeat_ms) == (30_000, 10_000)
    first = await house.meta.call(endpoints.HEARTBEAT, Heartbeat(session=A))
    assert len(first.grants) == 4
    assert first.ttl_ms == 30_000

    await house.meta.call(endpoints.JOIN, Join(subject="s", group="g", session=B, ttl_ms=6_000))
    kept = await house.meta.call(
        endpoints.HEARTBEAT, Heartbeat(session=A, known_version=first.version)
    )
    assert kept.version > first.version
    assert len(kept.grants) == 2
    assert held(kept).items() <= held(first).items()
    empty = await house.meta.call(endpoints.HEARTBEAT, Heartbeat(session=B))
    assert empty.grants == ()

    waiting = asyncio.create_task(
        house.meta.call(
            endpoints.HEARTBEAT, Heartbeat(session=B, known_version=empty.version, wait_ms=30_000)
        )
    )
    gone = held(first).keys() - held(kept).keys()
    for partition_id in gone:
        token = held(first)[partition_id]
        ask = ReleaseGrant(session=A, partition_id=partition_id, token=token)
        await house.meta.call(endpoints.RELEASE, ask)
        await house.meta.call(endpoints.RELEASE, ask)
    await waiting
    taken = held(await house.meta.call(endpoints.HEARTBEAT, Heartbeat(session=B)))
    assert taken.keys() == gone
    assert all(token > held(first)[key] for key, token in taken.items())

    await house.meta.call(endpoints.LEAVE, Leave(session=B))
    await house.meta.call(endpoints.LEAVE, Leave(session=B))
    back = held(await house.meta.call(endpoints.HEARTBEAT, Heartbeat(session=A)))
    assert back.keys() == held(first).keys()
    assert all(back[key] > taken[key] for key in gone)
    view = await house.meta.call(endpoints.GROUP, subject="s", group="g")
    assert view.sessions == 1
    assert {owner.partition.partition_id: owner.token for owner in view.owners} == back
    assert {owner.client for owner in view.owners} == {"one"}
    assert all(0 < (owner.expires_in_ms or 0) <= 30_000 for owner in view.owners)
    assert (await house.meta.call(endpoints.GROUPS, subject="s")).groups == ["g"]


async def test_switch_answers_waiting_heartbeats(house: MetaAndBroker) -> None:
    """A waiting heartbeat learns at once that its session has ended; shared sessions are granted
    every partition.
    """
    await house.meta.create_subject(CreateSubject(subject="s", partitions=4))
    await house.meta.call(endpoints.JOIN, Join(subject="s", group="g", session=A))
    first = await house.meta.call(endpoints.HEARTBEAT, Heartbeat(session=A))
    waiting = asyncio.create_task(
        house.meta.call(
            endpoints.HEARTBEAT, Heartbeat(session=A, known_version=first.version, wait_ms=5_000)
        )
    )
    await asyncio.sleep(0.1)
    began = time.monotonic()
    to_shared = SwitchGroup(strategy=ConsumeStrategy.SHARED)
    view = await house.meta.call(endpoints.SWITCH_GROUP, to_shared, subject="s", group="g")
    assert (view.strategy, view.sessions) == (ConsumeStrategy.SHARED, 0)
    with pytest.raises(SessionUnknownError):
        await waiting
    assert time.monotonic() - began < 4
    with raises(Reason.GROUP_STRATEGY):
        await house.meta.call(endpoints.JOIN, Join(subject="s", group="g", session=B))
    for session in (B, C):
        ask = Join(subject="s", group="g", session=session, strategy=ConsumeStrategy.SHARED)
        await house.meta.call(endpoints.JOIN, ask)
    shared = held(await house.meta.call(endpoints.HEARTBEAT, Heartbeat(session=B)))
    assert shared == held(await house.meta.call(endpoints.HEARTBEAT, Heartbeat(session=C)))
    assert min(shared.values()) > max(held(first).values())
    refused, token = next(iter(shared.items()))
    ask = ReleaseGrant(session=B, partition_id=refused, token=token)
    await house.meta.call(endpoints.RELEASE, ask)
    await house.meta.call(endpoints.RELEASE, ask)
    after = held(await house.meta.call(endpoints.HEARTBEAT, Heartbeat(session=C)))
    assert after == shared | {refused: max(shared.values()) + 1}
    assert (
        await house.meta.call(endpoints.SWITCH_GROUP, to_shared, subject="s", group="g")
    ).sessions == 2, "it is so already"


async def test_cordon_is_stored_and_an_unknown_operation_refused(house: MetaAndBroker) -> None:
    """A cordon is kept by the database; an unknown operation or group is a typed error."""
    async with hosting_broker(house.meta, "right"):
        assert (await house.meta.call(endpoints.CORDON, Cordon(), group="left")).cordoned
        made = await house.meta.create_subject(CreateSubject(subject="s", partitions=4))
        assert {partition.broker_group for partition in made.route.partitions} == {"right"}
        ids = (made.route.partitions[0].partition_id,)
        move = Reshape(kind=OperationKind.MOVE, partition_ids=ids, broker_group="left")
        with raises(Reason.BROKER_CORDONED):
            await house.meta.call(endpoints.RESHAPE, move)
        assert not (
            await house.meta.call(endpoints.CORDON, Cordon(cordoned=False), group="left")
        ).cordoned
        with raises(Reason.BROKER_GROUP_UNKNOWN):
            await house.meta.call(endpoints.CORDON, Cordon(), group="nowhere")
        with raises(Reason.OPERATION_UNKNOWN):
            await house.meta.call(endpoints.CANCEL_OPERATION, id=99)


async def test_silent_consumer_is_replaced(house: MetaAndBroker) -> None:
    """With a ttl of 1 s the partitions of a silent consumer are soon another's, and it stays
    dead.
    """
    await house.meta.create_subject(CreateSubject(subject="s", partitions=2))
    await house.meta.call(endpoints.JOIN, Join(subject="s", group="g", session=A, ttl_ms=1_000))
    first = held(await house.meta.call(endpoints.HEARTBEAT, Heartbeat(session=A)))
    start = time.monotonic()
    await house.meta.call(endpoints.JOIN, Join(subject="s", group="g", session=B, ttl_ms=60_000))
    known = -1
    taken: dict[int, int] = {}
    while len(taken) < 2 and time.monotonic() - start < 60:
        grants = await house.meta.call(
            endpoints.HEARTBEAT, Heartbeat(session=B, known_version=known, wait_ms=20_000)
        )
        known, taken = grants.version, held(grants)
    assert time.monotonic() - start < 15, "before the wait of a heartbeat was over"
    assert all(taken[key] > first[key] for key in first)
    with pytest.raises(SessionUnknownError):
        await house.meta.call(endpoints.HEARTBEAT, Heartbeat(session=A))
    ask = ReleaseGrant(session=A, partition_id=min(first), token=first[min(first)])
    with pytest.raises(SessionUnknownError):
        await house.meta.call(endpoints.RELEASE, ask)
    assert (await house.meta.call(endpoints.GROUP, subject="s", group="g")).sessions == 1


async def test_repeated_join_changes_nothing(house: MetaAndBroker) -> None:
    """A join that is repeated because its answer was lost changes nothing."""
    await house.meta.create_subject(CreateSubject(subject="s", partitions=2))
    ask = Join(subject="s", group="g", session=A)
    assert await house.meta.call(endpoints.JOIN, ask) == await house.meta.call(endpoints.JOIN, ask)
    before = await house.meta.call(endpoints.HEARTBEAT, Heartbeat(session=A))
    await house.meta.call(endpoints.JOIN, ask)
    assert await house.meta.call(endpoints.HEARTBEAT, Heartbeat(session=A)) == before
    with pytest.raises(InvalidRequestError):
        await house.meta.call(endpoints.JOIN, Join(subject="s", group="other", session=A))


async def test_heartbeat_without_changes_returns_after_its_wait(house: MetaAndBroker) -> None:
    """It never waits longer than a third of the ttl."""
    await house.meta.create_subject(CreateSubject(subject="s", partitions=2))
    await house.meta.call(endpoints.JOIN, Join(subject="s", group="g", session=A, ttl_ms=1_200))
    grants = await house.meta.call(endpoints.HEARTBEAT, Heartbeat(session=A))
    for wait_ms, low, high in ((100, 0.1, 0.35), (30_000, 0.4, 0.8)):
        start = time.monotonic()
        ask = Heartbeat(session=A, known_version=grants.version, wait_ms=wait_ms)
        assert await house.meta.call(endpoints.HEARTBEAT, ask) == grants
        assert low <= time.monotonic() - start < high


async def test_route_long_poll_returns_when_an_address_changes(house: MetaAndBroker) -> None:
    """It returns at once when a broker comes back under another address."""
    made = await house.meta.create_subject(CreateSubject(subject="s", partitions=2))
    waiting = asyncio.create_task(house.meta.route("s", known_version=1, wait_ms=30_000))
    grants_before = await house.meta.call(endpoints.JOIN, Join(subject="s", group="g", session=A))
    assert grants_before.ttl_ms
    grants = await house.meta.call(endpoints.HEARTBEAT, Heartbeat(session=A))
    polling = asyncio.create_task(
        house.meta.call(
            endpoints.HEARTBEAT, Heartbeat(session=A, known_version=grants.version, wait_ms=30_000)
        )
    )
    await asyncio.sleep(0.1)
    assert not waiting.done()
    start = time.monotonic()
    async with hosting_broker(house.meta, "left", house.broker.broker_id) as moved:
        route = await waiting
        assert route.version == made.route.version + 1
        assert {partition.address for partition in route.partitions} == {moved.address}
        told = await polling
        assert told.version > grants.version
        assert {grant.partition.address for grant in told.grants} == {moved.address}
        assert held(told) == held(grants)
    assert time.monotonic() - start < 8, "before a heartbeat had waited for a third of its ttl"
    same = await house.meta.route("s", known_version=route.version, wait_ms=50)
    assert same == route
    start = time.monotonic()
    assert await house.meta.route("s", known_version=route.version + 3, wait_ms=50) == route
    assert time.monotonic() - start >= 0.05  # who knows a newer one does not ask without a pause


async def test_silent_broker_has_no_address(tmp_path: Path, database: dict[str, str]) -> None:
    """A broker that is silent for its ttl has no address in the route, and gets no new
    partitions.
    """
    async with running_house(
        tmp_path, broker_heartbeat_ms=50, broker_ttl_ms=5_000, **database
    ) as house:
        await house.broker.report(house.meta)
        route = (await house.meta.create_subject(CreateSubject(subject="s"))).route
        async with asyncio.timeout(60):
            while {partition.address for partition in route.partitions} != {None}:
                route = await house.meta.route("s", known_version=route.version, wait_ms=5_000)
        with raises(Reason.NOT_ENOUGH_BROKERS):
            await house.meta.create_subject(CreateSubject(subject="t"))
        await house.broker.report(house.meta)
        back = await house.meta.route("s", known_version=route.version)
        assert back.version == route.version + 1
        assert {partition.address for partition in back.partitions} == {house.broker.address}


async def test_creation_continues_after_a_refusal(house: MetaAndBroker) -> None:
    """A creation that a broker refused serves no route, and completes by itself when the broker
    answers.
    """
    house.broker.refuse_after = 1
    with raises(Reason.NOT_ENOUGH_BROKERS):
        await house.meta.create_subject(CreateSubject(subject="s", partitions=3))
    with pytest.raises(SubjectUnknownError):
        await house.meta.route("s")
    assert (await house.meta.call(endpoints.SUBJECTS)).subjects == []
    with raises(Reason.SUBJECT_EXISTS):
        await house.meta.create_subject(CreateSubject(subject="s", partitions=2))
    house.broker.refuse_after = None
    for _ in range(100):
        if (await house.meta.call(endpoints.SUBJECTS)).subjects:
            break
        await asyncio.sleep(0.02)
    made = await house.meta.create_subject(CreateSubject(subject="s", partitions=3))
    assert len(route_table(made.route)) == 1024
    assert {partition.state for partition in made.route.partitions} == {PartitionState.OPEN}
    assert house.broker.hosted.keys() == {
        partition.partition_id for partition in made.route.partitions
    }


@pytest.mark.parametrize(
    "refusal",
    [
        FlushFailedError("the log was not flushed", operation="fdatasync"),
        InternalError("no JSON of ours"),
        InvalidRequestError("partition 1 is hosted with other facts"),
    ],
    ids=lambda error: type(error).__name__,
)
async def test_creation_waits_whatever_error_its_broker_answers(
    tmp_path: Path, refusal: KeylaneError
) -> None:
    """The error says why and where; the creation is retried and completes when the broker takes it;
    others are not blocked.
    """
    async with running_house(tmp_path) as house, hosting_broker(house.meta, "right") as right:
        house.broker.refusal, house.broker.refuse_after = refusal, 0
        ask = CreateSubject(subject="s", partitions=2)
        for _ in range(2):
            with raises(Reason.NOT_ENOUGH_BROKERS, match=f"'left': {refusal.message}"):
                await house.meta.create_subject(ask)
        tried = house.broker.calls
        async with asyncio.timeout(60):
            # By the periodic work, which continues after a failure.
            while house.broker.calls < tried + 3:
                await asyncio.sleep(0.02)
            house.broker.refuse_after = None
            while not (await house.meta.call(endpoints.SUBJECTS)).subjects:
                await asyncio.sleep(0.02)
        made = await house.meta.create_subject(ask)
        assert len(route_table(made.route)) == 1024
        assert len(right.hosted) == 1
        await house.meta.create_subject(CreateSubject(subject="t", partitions=1))


async def test_creation_is_refused_without_a_broker(
    tmp_path: Path, database: dict[str, str]
) -> None:
    """Without an available broker a subject is refused, and nothing is stored."""
    async with running_house(tmp_path, **database) as house:
        await house.broker.report(house.meta, writable=False)
        with raises(Reason.NOT_ENOUGH_BROKERS):
            await house.meta.create_subject(CreateSubject(subject="s"))
        await house.broker.report(house.meta)
        await house.meta.create_subject(CreateSubject(subject="s", partitions=1))


async def test_second_data_folder_of_a_live_group_is_refused(house: MetaAndBroker) -> None:
    """The first one stays."""
    ask = BrokerHeartbeat(
        version=VERSION, broker_group="left", broker_id="copy", address="127.0.0.1:9"
    )
    with raises(Reason.BROKER_GROUP_TAKEN, match="another data folder"):
        await house.meta.broker_heartbeat(ask)
    url = f"http://{house.address}/v1/brokers/heartbeat"
    async with aiohttp.ClientSession() as session:
        async with session.post(url, data=encode_json(ask)) as response:
            assert response.status == 409
    health = await house.meta.health()
    assert [broker["address"] for broker in health.details["brokers"]] == [house.broker.address]


async def test_subject_is_refused_when_it_exists_with_other_settings(house: MetaAndBroker) -> None:
    """So is a client with another order strategy."""
    strict = CreateSubject(subject="s", partitions=2, order_strategy=OrderStrategy.STRICT)
    await house.meta.create_subject(strict)
    by_default = await house.meta.create_subject(CreateSubject(subject="s", partitions=2))
    assert by_default.order_strategy is OrderStrategy.STRICT
    with raises(Reason.SUBJECT_EXISTS):
        await house.meta.create_subject(replace(strict, order_strategy=OrderStrategy.BEST_TRIED))
    with raises(Reason.SUBJECT_EXISTS, match="retention acked, not time") as refused:
        await house.meta.create_subject(replace(strict, retention=Retention.TIME))
    assert refused.value.retention == "acked"
    with raises(Reason.ORDER_STRATEGY) as mismatch:
        await house.meta.route("s", order_strategy=OrderStrategy.BEST_TRIED)
    assert (mismatch.value.stored, mismatch.value.asked) == ("strict", "best_tried")
    route = await house.meta.route("s", order_strategy=OrderStrategy.STRICT)
    assert route.order_strategy is OrderStrategy.STRICT


async def test_unknown_names_are_refused(house: MetaAndBroker) -> None:
    """Unknown subjects, groups, sessions and tokens are refused by name."""
    await house.meta.create_subject(CreateSubject(subject="s"))
    for endpoint in (endpoints.SUBJECT, endpoints.ROUTE, endpoints.GROUPS):
        with pytest.raises(SubjectUnknownError):
            await house.meta.call(endpoint, subject="unknown")
    with pytest.raises(SubjectUnknownError):
        await house.meta.call(endpoints.JOIN, Join(subject="unknown", group="g", session=A))
    with pytest.raises(GroupUnknownError):
        await house.meta.call(endpoints.GROUP, subject="s", group="unknown")
    with pytest.raises(InvalidRequestError, match=r"U\+0000"):
        await house.meta.call(endpoints.HEARTBEAT, Heartbeat(session="a\0b"))
    for session in (C, "short", "x" * 1000, ""):
        with pytest.raises(SessionUnknownError):
            await house.meta.call(endpoints.HEARTBEAT, Heartbeat(session=session))
        with pytest.raises(SessionUnknownError):
            await house.meta.call(
                endpoints.RELEASE, ReleaseGrant(session=session, partition_id=1, token=1)
            )
    await house.meta.call(endpoints.JOIN, Join(subject="s", group="g", session=A))
    (grant, *_) = (await house.meta.call(endpoints.HEARTBEAT, Heartbeat(session=A))).grants
    for partition_id, token in (
        (grant.partition.partition_id, grant.token + 100),
        (10**30, grant.token),
        (grant.partition.partition_id, 10**30),
        (-1, -1),
        (999, 1),
    ):
        with pytest.raises(TokenUnknownError):
            await house.meta.call(
                endpoints.RELEASE, ReleaseGrant(session=A, partition_id=partition_id, token=token)
            )
    drained = (10**30, -5, 999, grant.partition.partition_id)
    grants = await house.meta.call(endpoints.HEARTBEAT, Heartbeat(session=A, drained=drained))
    assert len(grants.grants) == 2


async def test_restart_keeps_everything(tmp_path: Path, database: dict[str, str]) -> None:
    """Routes, sessions and tokens are the same after a restart."""
    async with running_house(tmp_path, **database) as house:
        made = await house.meta.create_subject(CreateSubject(subject="s", partitions=3))
        await house.meta.call(endpoints.JOIN, Join(subject="s", group="g", session=A))
        before = await house.meta.call(endpoints.HEARTBEAT, Heartbeat(session=A))
    async with running_house(tmp_path, **database) as house:
        route = await house.meta.route("s")
        assert [partition.partition_id for partition in route.partitions] == [
            partition.partition_id for partition in made.route.partitions
        ]
        assert route.version >= made.route.version
        assert held(await house.meta.call(endpoints.HEARTBEAT, Heartbeat(session=A))) == held(
            before
        )


async def test_openapi_names_every_path(house: MetaAndBroker) -> None:
    """Every reference of the document resolves."""
    url = f"http://{house.address}/v1/openapi.json"
    async with aiohttp.ClientSession() as session, session.get(url) as response:
        text = await response.text()
        document = await response.json()
    assert "/v1/consumers/heartbeat" in document["paths"]
    for name in document["components"]["schemas"]:
        assert name
    for part in text.split('"$ref":"')[1:]:
        reference = part.split('"')[0]
        assert reference.rsplit("/", 1)[1] in document["components"]["schemas"]
