"""`keylane.Admin` against a real metaserver and real brokers, through the public face alone."""

from __future__ import annotations

import asyncio
import pickle

import msgspec
import pytest

import keylane
from keylane import Admin, Consumer, Message, Producer
from keylane.admin import OperationKind, OperationState, PartitionState
from keylane.errors import (
    ClosedError,
    ConfigError,
    GroupUnknownError,
    InvalidRequestError,
    NotSentError,
    PartitionUnknownError,
    Reason,
    SubjectUnknownError,
)
from support.cluster import Cluster
from support.raising import raises


@pytest.fixture
async def admin(shared_cluster: Cluster):
    """An admin of a cluster whose two brokers have reported themselves."""
    async with Admin(shared_cluster.meta) as admin, asyncio.timeout(60):
        while sum(broker.available for broker in (await admin.list_brokers()).brokers) < 2:
            await asyncio.sleep(0.05)
        yield admin


async def send(meta: str, subject: str, count: int) -> None:
    async with Producer(meta) as producer:
        for number in range(count):
            producer.send(subject, b"%d" % number, key=b"%d" % (number % 16))


async def handle(meta: str, subject: str, group: str, count: int) -> None:
    """Have a consumer of `group` handle `count` messages and leave."""
    seen: list[Message] = []
    everything = asyncio.Event()

    async def handler(message: Message) -> None:
        seen.append(message)
        if len(seen) >= count:
            everything.set()

    async with Consumer(meta, subject=subject, group=group, handler=handler):
        await everything.wait()


# ── subjects ──────────────────────────────────────────────────────────────────────────────────────
async def test_created_subject_is_listed_and_described(admin, shared_cluster):
    created = await admin.create_subject(
        "admin-new",
        partitions=4,
        order_strategy="best_tried",
        retention=keylane.admin.Retention.TIME,
    )
    assert (
        await admin.create_subject(
            "admin-new", partitions=4, order_strategy="best_tried", retention="time"
        )
        == created
    )
    summary = next(
        summary for summary in await admin.list_subjects() if summary.subject == "admin-new"
    )
    assert (summary.partitions, summary.order_strategy) == (4, keylane.OrderStrategy.BEST_TRIED)

    await send(shared_cluster.meta, "admin-new", 40)
    described = await admin.describe_subject("admin-new")
    assert (described.retention, described.static) == (keylane.admin.Retention.TIME, False)
    assert [(partition.range_start, partition.range_end) for partition in described.partitions] == [
        (0, 256),
        (256, 512),
        (512, 768),
        (768, 1024),
    ]
    assert {partition.state for partition in described.partitions} == {PartitionState.OPEN}
    assert {partition.broker_group for partition in described.partitions} == {"g1", "g2"}
    assert (
        sum(partition.next_offset - partition.first_offset for partition in described.partitions)
        == 40
    )
    assert {partition.problem for partition in described.partitions} == {None}


async def test_subject_with_other_settings_is_refused(admin):
    await admin.create_subject("admin-taken")
    with raises(Reason.SUBJECT_EXISTS):
        await admin.create_subject("admin-taken", partitions=3)
    with pytest.raises(SubjectUnknownError):
        await admin.describe_subject("admin-nosuch")
    with pytest.raises(SubjectUnknownError):
        await admin.history("admin-nosuch")


# ── groups ────────────────────────────────────────────────────────────────────────────────────────
async def test_group_is_listed_described_and_reset(admin, shared_cluster):
    meta = shared_cluster.meta
    await admin.create_subject("admin-read")
    await send(meta, "admin-read", 30)
    with pytest.raises(GroupUnknownError):
        await admin.lag("admin-read", "billing")
    await handle(meta, "admin-read", "billing", 30)
    await send(meta, "admin-read", 12)

    (summary,) = await admin.list_groups("admin-read")
    assert (summary.group, summary.sessions) == ("billing", 0)
    described = await admin.describe_group("admin-read", "billing")
    assert described.strategy is keylane.ConsumeStrategy.EXCLUSIVE
    assert (described.lag, sum(partition.offset for partition in described.partitions)) == (12, 30)
    assert all(
        partition.token > 0 and partition.owner is None for partition in described.partitions
    )
    assert await admin.lag("admin-read", "billing") == 12

    done = await admin.reset_group("admin-read", "billing", "earliest")
    assert {cursor.cursor for cursor in done.cursors} == {0}
    assert await admin.lag("admin-read", "billing") == 42
    await admin.reset_group("admin-read", "billing", keylane.admin.ResetTo.LATEST)
    assert await admin.lag("admin-read", "billing") == 0
    first = described.partitions[0].partition_id
    done = await admin.reset_group("admin-read", "billing", "offset", offset=1, partition_id=first)
    assert [(cursor.partition_id, cursor.cursor) for cursor in done.cursors] == [(first, 1)]
    await admin.reset_group("admin-read", "billing", "time", at_ms=0)
    assert await admin.lag("admin-read", "billing") == 42


async def test_group_with_consumers_is_not_reset(admin, shared_cluster):
    await admin.create_subject("admin-busy")
    async with Consumer(shared_cluster.meta, subject="admin-busy", group="g", handler=print):
        with raises(Reason.GROUP_BUSY):
            await admin.reset_group("admin-busy", "g", "latest")


async def test_group_is_switched(admin, shared_cluster):
    await admin.create_subject("admin-switch")
    await send(shared_cluster.meta, "admin-switch", 4)
    await handle(shared_cluster.meta, "admin-switch", "g", 4)
    view = await admin.switch_group("admin-switch", "g", "shared")
    assert view.strategy is keylane.ConsumeStrategy.SHARED
    assert (await admin.list_groups("admin-switch"))[0].strategy == "shared"


# ── partitions ────────────────────────────────────────────────────────────────────────────────────
async def test_partitions_are_resized_split_merged_and_moved(admin):
    await admin.create_subject("admin-shape")
    plan = await admin.resize("admin-shape", 4, dry_run=True)
    assert (plan.operation_id, len(plan.children)) == (0, 4)
    assert await admin.wait(plan) == plan
    assert await admin.list_operations("admin-shape") == []

    done = await admin.wait(await admin.resize("admin-shape", 4))
    assert (done.kind, done.state) == (OperationKind.RESIZE, OperationState.DONE)
    again = await admin.wait(await admin.resize("admin-shape", 4))
    assert (again.operation_id, again.children) == (0, ())

    first, second, *_ = await open_ids(admin, "admin-shape")
    await admin.wait(await admin.merge([first, second]))
    merged, *_ = await open_ids(admin, "admin-shape")
    states = [view.state async for view in admin.follow(await admin.split(merged))]
    assert states[-1] is OperationState.DONE
    open_ones = await open_ids(admin, "admin-shape")
    assert len(open_ones) == 4
    moved = await admin.wait(await admin.move(open_ones, to="g2"))
    described = await admin.describe_subject("admin-shape")
    homes = {
        partition.broker_group for partition in described.partitions if partition.state == "open"
    }
    assert homes == {"g2"}

    kinds = [operation.kind for operation in await admin.list_operations("admin-shape")]
    assert kinds == ["move", "split", "merge", "resize"]
    history = await admin.history("admin-shape")
    assert len(history.partitions) == 2 + 4 + 1 + 2 + len(moved.sealed)
    parents = {
        entry.partition.partition_id: entry.partition.parents for entry in history.partitions
    }
    assert parents[merged] == (first, second)


async def open_ids(admin: Admin, subject: str) -> list[int]:
    """The open partitions, by range."""
    described = await admin.describe_subject(subject)
    return [
        partition.partition_id
        for partition in described.partitions
        if partition.state is PartitionState.OPEN
    ]


async def test_operation_that_is_done_is_not_canceled(admin):
    await admin.create_subject("admin-done")
    done = await admin.wait(await admin.resize("admin-done", 3))
    with pytest.raises(keylane.KeylaneError) as caught:
        await admin.cancel(done.operation_id)
    assert caught.value.reason is Reason.OPERATION_FORWARD
    with raises(Reason.OPERATION_UNKNOWN):
        await admin.cancel(999_999)


async def test_static_subject_is_moved_and_not_resized(admin):
    await admin.create_subject("admin-static", static=True)
    with raises(Reason.SUBJECT_STATIC):
        await admin.resize("admin-static", 3)
    (first, _second) = await open_ids(admin, "admin-static")
    assert (await admin.wait(await admin.move([first], to="g1"))).children == ()


# ── brokers ───────────────────────────────────────────────────────────────────────────────────────
async def test_broker_group_is_cordoned_and_evacuated(admin):
    assert (await admin.cordon("g1")).cordoned
    try:
        listed = {
            broker.broker_group: broker.cordoned for broker in (await admin.list_brokers()).brokers
        }
        assert listed == {"g1": True, "g2": False}
        await admin.create_subject("admin-narrow")
        described = await admin.describe_subject("admin-narrow")
        assert {partition.broker_group for partition in described.partitions} == {"g2"}
        (first, _second) = await open_ids(admin, "admin-narrow")
        with raises(Reason.BROKER_CORDONED):
            await admin.move([first], to="g1")
    finally:
        assert not (await admin.uncordon("g1")).cordoned
    plan = await admin.evacuate("g2", dry_run=True)
    assert "admin-narrow" in {view.subject for view in plan.operations}
    assert plan.cordoned == ""


async def test_broker_group_that_never_reported_is_unknown(admin):
    for call in (admin.cordon, admin.uncordon, admin.evacuate, admin.accept_folder):
        with raises(Reason.BROKER_GROUP_UNKNOWN):
            await call("nowhere")


async def test_health_and_verification(admin, shared_cluster):
    broker = (await admin.list_brokers()).brokers[0]
    assert (await admin.broker_health(broker.address)).program == "broker"
    assert (await admin.health()).program == "metaserver"
    with pytest.raises(InvalidRequestError):
        await admin.broker_health(shared_cluster.meta)
    with pytest.raises(ConfigError):
        await admin.broker_health("")
    async with Admin(broker.address) as misled:
        with pytest.raises(InvalidRequestError):
            await misled.health()
    verification = await admin.verify()
    assert verification.ok, verification
    assert [check.code for check in verification.checks] == [f"V{n:02}" for n in range(1, 14)]


# ── bad input ─────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize("name", ["", "../x", "a/b", " ", None, 7, b"x"])
async def test_illegal_name_is_refused_by_every_call(admin, name):
    calls = [
        admin.create_subject(name),
        admin.describe_subject(name),
        admin.history(name),
        admin.list_groups(name),
        admin.describe_group(name, "g"),
        admin.describe_group("s", name),
        admin.lag("s", name),
        admin.reset_group("s", name, "latest"),
        admin.switch_group(name, "g", "shared"),
        admin.resize(name, 2),
        admin.move([1], to=name),
        admin.evacuate(name),
        admin.list_operations(name),
        admin.cordon(name),
        admin.uncordon(name),
        admin.accept_folder(name),
    ]
    for call in calls:
        with raises(Reason.NAME_INVALID):
            await call


async def test_argument_out_of_range_is_refused_with_its_name(admin):
    await admin.create_subject("admin-args")
    calls = {
        "partitions": [
            admin.create_subject("s", partitions=0),
            admin.create_subject("s", partitions="2"),
            admin.create_subject("s", partitions=2_000),
            admin.resize("admin-args", "3"),
            admin.resize("admin-args", 0),
            admin.resize("admin-args", None),
        ],
        "strategy": [
            admin.create_subject("s", order_strategy="loose"),
            admin.switch_group("admin-args", "g", "alone"),
        ],
        "retention": [admin.create_subject("s", retention="never")],
        "to": [admin.reset_group("admin-args", "g", "yesterday")],
        "offset": [admin.reset_group("admin-args", "g", "offset", offset=-1)],
        "at_ms": [admin.reset_group("admin-args", "g", "time", at_ms=1.5)],
        "partition_ids": [admin.merge(3), admin.move(["1"], to="g1"), admin.split(None)],
        "dry_run": [admin.evacuate("g1", dry_run=1)],
        "id": [admin.cancel(0), admin.cancel("1"), admin.cancel(None)],
    }
    for word, mistakes in calls.items():
        for mistake in mistakes:
            with pytest.raises(InvalidRequestError, match=word):
                await mistake
    with pytest.raises(PartitionUnknownError) as unknown:
        await admin.split(999_999)
    assert unknown.value.partition_id == 999_999
    with pytest.raises(InvalidRequestError, match="at consume_strategy: one of exclusive, shared"):
        await admin.switch_group("admin-args", "g", "alone")


async def test_admin_works_only_while_it_is_open(shared_cluster):
    with pytest.raises(ConfigError):
        Admin("")
    for timeout_ms in ("5", None, 0, -1, float("nan"), True):
        with pytest.raises(ConfigError, match="call_timeout_ms"):
            Admin("127.0.0.1:1", call_timeout_ms=timeout_ms)
    admin = Admin(shared_cluster.meta)
    with pytest.raises(ClosedError):
        await admin.list_subjects()
    async with admin:
        await admin.list_subjects()
        with pytest.raises(InvalidRequestError):
            pickle.dumps(admin)
    with pytest.raises(ClosedError):
        await admin.verify()
    await admin.close()
    async with admin:
        assert (await admin.health()).ready


async def test_absent_metaserver_is_not_sent(unused_tcp_port):
    async with Admin(f"127.0.0.1:{unused_tcp_port}") as admin:
        with pytest.raises(NotSentError):
            await admin.resize("s", 3)


async def test_silent_broker_leaves_the_rest_described(cluster):
    """Its partitions have a problem instead of offsets; a lag that cannot be known is an error."""
    async with Admin(cluster.meta) as admin:
        await cluster.create("known")
        await send(cluster.meta, "known", 40)
        await handle(cluster.meta, "known", "g", 40)
        cluster.brokers[0].kill()
        subject = await admin.describe_subject("known")
        group = await admin.describe_group("known", "g")
        for described in (subject.partitions, group.partitions):
            silent = [partition for partition in described if partition.broker_group == "g1"]
            assert all(partition.problem and partition.next_offset is None for partition in silent)
            rest = [partition for partition in described if partition.broker_group == "g2"]
            assert rest
            assert all(
                partition.problem is None and partition.next_offset >= 0 for partition in rest
            )
        assert group.lag is None
        with pytest.raises(NotSentError):
            await admin.lag("known", "g")
        cluster.brokers[0].restart()


async def test_wait_raises_when_the_operation_is_not_listed(admin):
    """The metaserver's database may have been lost since; a call that waits for ever would hide
    it.
    """
    await admin.create_subject("admin-unlisted", partitions=1)
    planned = await admin.resize("admin-unlisted", 2, dry_run=True)
    unlisted = msgspec.structs.replace(planned, operation_id=987_654)
    with raises(Reason.OPERATION_UNKNOWN):
        await asyncio.wait_for(admin.wait(unlisted), 60)
    for wrong in (None, 3, [planned]):
        with pytest.raises(InvalidRequestError):
            await admin.wait(wrong)
