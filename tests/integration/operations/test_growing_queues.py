"""Static subjects on real processes are given more queues while messages flow: order, offsets and
numbers stay.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from pathlib import Path

import pytest

from keylane import Admin, Consumer, Message, Producer, QueueReader
from keylane.protocol.errors import (
    InvalidRequestError,
    Reason,
)
from keylane.protocol.operations import OperationKind, OperationState, Reshape
from keylane.protocol.queues import QueueView
from keylane.protocol.routing import logical_partition
from support.cluster import ALERT, Cluster, begun, done_operation, eventually
from support.load import Load
from support.lost_database import rebuild_lost_database
from support.raising import raises
from support.server_process import run_keylane

TTL_MS = 8_000
"""No consumer loses its lease, and handles anything twice, because a program takes long to start
again.
"""


async def whole(reader: QueueReader, queue: int) -> list[Message]:
    """All messages of a queue, read by logic offset."""
    low, high = await reader.bounds(queue)
    messages: list[Message] = []
    while low + len(messages) < high:
        messages += (await reader.read(queue, low + len(messages))).messages
    return messages


async def check_queues(reader: QueueReader, handled: Iterable[Message]) -> None:
    """
    Each queue has logic offsets from 0 on without a gap, of the messages that the group handled;
    its last partition has keys of its range alone.
    """
    by_queue: dict[int, dict[int, bytes]] = {}
    for message in handled:
        by_queue.setdefault(message.queue, {})[message.logic_offset] = message.value
    queues = await reader.queues()
    assert [view.queue for view in queues] == list(range(len(queues)))
    for view in queues:
        messages = await whole(reader, view.queue)
        assert [message.logic_offset for message in messages] == list(range(len(messages)))
        assert {message.logic_offset: message.value for message in messages} == by_queue.get(
            view.queue, {}
        )
        last = view.segments[-1].partition
        for message in messages:
            if message.partition_id == last.partition_id:
                assert view.range_start <= logical_partition(message.key) < view.range_end


async def check(cluster: Cluster, load: Load, subject: str) -> None:
    """The order holds in the logs, and every check of `meta verify`."""
    await cluster.check_history(subject, load.sent)
    async with Admin(cluster.meta) as admin:
        checks = (await admin.verify()).checks
    assert not [check.violations for check in checks if check.violations]


def ranges(views: list[QueueView]) -> list[tuple[int, int]]:
    return [(view.range_start, view.range_end) for view in views]


async def test_queues_grow_under_load(shared_cluster: Cluster):
    """Three growths while messages flow: each key in order, each message once, every queue without
    a gap.
    """
    meta = shared_cluster.meta
    await shared_cluster.create("growing", partitions=2, static=True)
    async with (
        QueueReader(meta, subject="growing") as reader,
        Load(meta, "growing", keys=80) as load,
        Admin(meta) as admin,
    ):
        await load.progress(400)
        before = (await reader.queues())[0].segments[0].partition
        plan = await admin.grow_subject("growing", queues=[0], dry_run=True)
        assert (plan.operation_id, [child.queue for child in plan.children]) == (0, [0, 2])
        assert ranges(await reader.queues()) == [(0, 512), (512, 1024)]
        for growth in (
            {"queues": [0]},
            {"count": 5},
            {"queues": [2, 4]},
        ):
            await admin.wait(await admin.grow_subject("growing", **growth))
            await load.progress(400)
        assert (await admin.grow_subject("growing", 7)).operation_id == 0
        await load.finish()
        load.check()
        await check_queues(reader, load.handled["audit"])
        assert ranges(await reader.queues()) == [
            (0, 128),
            (512, 768),
            (256, 384),
            (768, 1024),
            (128, 192),
            (384, 512),
            (192, 256),
        ]
        first, second, third = (await reader.queues())[0].segments
        assert first.partition.partition_id == before.partition_id
        assert 0 < first.logic_end == second.partition.logic_start
        assert first.logic_end < second.logic_end == third.partition.logic_start
        progress = [await reader.progress(queue, "audit") for queue in range(7)]
        assert sum(each.max_offset for each in progress) == load.count
        assert all((each.cursor, each.lag) == (each.max_offset, 0) for each in progress)
    await check(shared_cluster, load, "growing")


async def test_group_reads_the_split_queue_first_when_it_was_stopped_meanwhile(
    shared_cluster: Cluster,
):
    """A group that comes after two growths gets each key's messages in order, over all
    partitions.
    """
    meta = shared_cluster.meta
    await shared_cluster.create("stopped-meanwhile", partitions=1, static=True)
    keys = [b"key-%d" % number for number in range(24)]
    async with Producer(meta) as producer, Admin(meta) as admin:
        for number in range(3):
            if number:
                await admin.wait(await admin.grow_subject("stopped-meanwhile", 2 * number))
            for key in keys:
                await producer.send("stopped-meanwhile", b"%d" % number, key=key)
    seen: list[Message] = []
    async with Consumer(meta, subject="stopped-meanwhile", group="g", handler=seen.append):
        await eventually(lambda: len(seen) >= 3 * len(keys))
    for key in keys:
        assert [message.value for message in seen if message.key == key] == [b"0", b"1", b"2"]
    async with QueueReader(meta, subject="stopped-meanwhile") as reader:
        await check_queues(reader, seen)


async def test_messages_without_a_key_reach_new_queues(shared_cluster: Cluster):
    """A producer that was open before the growth learns the new queue, without an error."""
    meta = shared_cluster.meta
    await shared_cluster.create("keyless", partitions=1, static=True)
    async with (
        Producer(meta) as producer,
        Admin(meta) as admin,
        QueueReader(meta, subject="keyless") as reader,
    ):
        await producer.send("keyless", b"before")
        await admin.wait(await admin.grow_subject("keyless", queues=[0]))
        async with asyncio.timeout(30):
            while await reader.bounds(1) == (0, 0):
                await producer.send("keyless", b"after")


async def test_impossible_growths_are_refused(shared_cluster: Cluster):
    """Each has an error of its own and changes nothing."""
    await shared_cluster.create("stays", partitions=2, static=True)
    await shared_cluster.create("no-queues", partitions=2)
    async with (
        Admin(shared_cluster.meta) as admin,
        QueueReader(shared_cluster.meta, subject="stays") as reader,
    ):
        before = await reader.queues()
        for subject, growth, error in (
            ("no-queues", {"count": 3}, Reason.SUBJECT_NOT_STATIC),
            ("stays", {"queues": [2]}, Reason.QUEUE_UNKNOWN),
            ("stays", {"queues": ["0"]}, InvalidRequestError),
            ("stays", {"count": 1}, InvalidRequestError),
            ("stays", {"count": 1025}, InvalidRequestError),
            ("stays", {"count": 3, "queues": [0]}, InvalidRequestError),
            ("stays", {}, InvalidRequestError),
        ):
            with raises(error):
                await admin.grow_subject(subject, **growth)
        assert await reader.queues() == before


async def test_grow_command_splits_queues(shared_cluster: Cluster):
    """`--queue` splits the queues that are named, `--queues` the widest; a dry run shows the new
    queues.
    """
    await shared_cluster.create("cli-grown", partitions=2, static=True)

    async def grow(*words: str) -> tuple[int, str, str]:
        done = await asyncio.to_thread(
            run_keylane, "subject", "grow", "cli-grown", *words, "--meta", shared_cluster.meta
        )
        return done.returncode, done.stdout, done.stderr

    status, planned, _ = await grow("--queues", "3", "--dry-run")
    assert status == 0
    assert "grow of cli-grown: a plan only" in planned
    assert "queue" in planned
    status, done, _ = await grow("--queue", "0", "--queue", "1")
    assert status == 0
    assert "6 of 6 steps" in done
    assert (await grow("--queues", "4"))[1] == "nothing to do\n"
    for words, text in (
        ((), "--queue"),
        (("--queue", "0", "--queues", "5"), "--queue"),
        (("--queue", "9"), "QUEUE_UNKNOWN"),
        (("--queues", "2"), "InvalidRequestError"),
    ):
        status, _, errors = await grow(*words)
        assert status != 0
        assert text in errors
    async with QueueReader(shared_cluster.meta, subject="cli-grown") as reader:
        assert ranges(await reader.queues()) == [(0, 256), (512, 768), (256, 512), (768, 1024)]


STEPS = [
    *("planned", "sealing"),
    *(pytest.param(step, marks=pytest.mark.whole) for step in ("hosted", "opened")),
]


@pytest.mark.crash
@pytest.mark.cluster(meta_settings=ALERT)
@pytest.mark.parametrize("step", STEPS)
async def test_growth_continues_when_the_metaserver_is_killed(cluster: Cluster, step: str):
    """After any step it continues in its state; each key in order, each message once, no logic
    offset missing.
    """
    await cluster.create("cut", partitions=1, static=True)
    program = cluster.meta_program
    async with (
        Load(cluster.meta, "cut", keys=30, ttl_ms=TTL_MS) as load,
        Admin(cluster.meta) as admin,
        QueueReader(cluster.meta, subject="cut") as reader,
    ):
        await load.progress(200)
        program.restart_to_die_after(step)
        await begun(
            admin._metaserver_client, Reshape(kind=OperationKind.GROW, subject="cut", partitions=3)
        )
        await program.died()
        program.restart()
        (view,) = await admin.list_operations("cut")
        if view.state is OperationState.PLAN:
            with raises((Reason.OPERATION_RUNNING, InvalidRequestError)):
                await admin.grow_subject("cut", 2)
        await done_operation(admin._metaserver_client, view)
        await load.progress(200)
        await load.finish()
        load.check()
        await check_queues(reader, load.handled["audit"])
        assert ranges(await reader.queues()) == [(0, 256), (512, 1024), (256, 512)]
    await check(cluster, load, "cut")


@pytest.mark.crash
@pytest.mark.cluster(meta_settings=ALERT)
@pytest.mark.parametrize("step", STEPS)
async def test_growth_continues_when_a_broker_is_killed(cluster: Cluster, step: str):
    """The broker of the split queue dies with the metaserver after any step; the order holds when
    both are back.
    """
    await cluster.create("killed", partitions=1, static=True)
    program = cluster.meta_program
    async with (
        Load(cluster.meta, "killed", keys=30, ttl_ms=TTL_MS) as load,
        Admin(cluster.meta) as admin,
        QueueReader(cluster.meta, subject="killed") as reader,
    ):
        await load.progress(200)
        source = (await reader.queues())[0].segments[0].partition.broker_group
        broker = cluster.brokers[int(source[1:]) - 1]
        program.restart_to_die_after(step)
        await begun(
            admin._metaserver_client,
            Reshape(kind=OperationKind.GROW, subject="killed", queues=(0,)),
        )
        await program.died()
        broker.kill()
        program.restart()
        (view,) = await admin.list_operations("killed")
        broker.restart()
        await done_operation(admin._metaserver_client, view)
        await load.progress(200)
        await load.finish()
        # Messages that were not acked at the kill may come again.
        first = {(each.queue, each.logic_offset): each for each in load.handled["audit"][::-1]}
        in_order = [
            each for each in load.handled["audit"] if first[each.queue, each.logic_offset] is each
        ]
        for key, values in load.sent.items():
            assert [each.value for each in in_order if each.key == key] == values
        await check_queues(reader, in_order)
        assert ranges(await reader.queues()) == [(0, 512), (512, 1024)]
    await check(cluster, load, "killed")


async def test_grown_queues_survive_a_lost_database(tmp_path: Path):
    """The rebuilt subject has the same queues, ranges and logic offsets, and can grow and move
    again.
    """
    with Cluster(tmp_path) as cluster:
        await cluster.create("lost", partitions=1, static=True)
        async with (
            Load(cluster.meta, "lost", keys=30, ttl_ms=TTL_MS) as load,
            QueueReader(cluster.meta, subject="lost") as reader,
            Admin(cluster.meta) as admin,
        ):
            for count in (2, 4):
                await load.progress(200)
                await admin.wait(await admin.grow_subject("lost", count))
            await load.progress(200)
            last = (await reader.queues())[3].segments[-1].partition
            to = "g2" if last.broker_group == "g1" else "g1"
            await admin.wait(await admin.move([last.partition_id], to=to))
            before = await reader.queues()
            await rebuild_lost_database(cluster, tmp_path)
            assert places(await reader.queues()) == places(before)
            await load.progress(200)
            await eventually_grown(admin, "lost", 5)
            await load.progress(200)
            await load.finish()
            load.check()
            await check_queues(reader, load.handled["audit"])
        await check(cluster, load, "lost")


async def eventually_grown(admin: Admin, subject: str, count: int) -> None:
    """Grow as soon as the metaserver knows the brokers."""
    while not [broker for broker in (await admin.list_brokers()).brokers if broker.available]:
        await asyncio.sleep(0.05)
    await admin.wait(await admin.grow_subject(subject, count))


def places(views: list[QueueView]) -> list[object]:
    """Range and partitions of each queue, each partition with its logic start and end."""
    return [
        (
            (view.range_start, view.range_end),
            [
                (segment.partition.partition_id, segment.partition.logic_start, segment.logic_end)
                for segment in view.segments
            ],
        )
        for view in views
    ]
