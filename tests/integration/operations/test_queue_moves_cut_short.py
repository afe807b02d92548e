"""Moves of a logic queue that are interrupted, and dead sources: logic offsets continue."""

from __future__ import annotations

import asyncio
import contextlib
import time
from pathlib import Path

import pytest

from keylane import QueueReader
from keylane.protocol import endpoints
from keylane.protocol.errors import (
    PartitionUnknownError,
    Reason,
    UnavailableError,
    UnreachableError,
)
from keylane.protocol.operations import OperationKind, OperationState, OperationView, Reshape
from keylane.protocol.queues import QueueView
from keylane.rpc.client import MetaClient
from support.cluster import ALERT, Cluster, done_operation, meta_of
from support.load import Load
from support.lost_database import rebuild_lost_database
from support.raising import raises

TTL_MS = 8_000
"""No consumer loses its lease, and handles anything twice, because a program takes long to start
again.
"""


pytestmark = pytest.mark.cluster(meta_settings=ALERT)


async def begin(meta: MetaClient, ask: Reshape) -> OperationView:
    """Begin a move as soon as the metaserver knows the brokers."""
    until = time.monotonic() + 60
    while True:
        try:
            return (await meta.call(endpoints.RESHAPE, ask)).operations[0]
        except UnavailableError:
            assert time.monotonic() < until
            await asyncio.sleep(0.05)


def contiguous(queue: QueueView) -> bool:
    """Each segment begins where the one before it ended, the first at 0."""
    starts = [segment.partition.logic_start for segment in queue.segments]
    ends = [segment.logic_end for segment in queue.segments]
    return [*starts, None] == [0, *ends]


def other(queue: QueueView) -> str:
    return "g2" if queue.segments[-1].partition.broker_group == "g1" else "g1"


async def check(cluster: Cluster, load: Load, subject: str) -> None:
    """The order holds, and the queue has the logic offsets of all handled messages."""
    load.check()
    seen = sorted(message.logic_offset for message in load.handled["audit"])
    assert seen == list(range(load.count))
    await cluster.check_history(subject, load.sent)
    async with meta_of(cluster) as meta:
        checks = (await meta.call(endpoints.VERIFY)).checks
    assert not [check.violations for check in checks if check.violations]


@pytest.mark.crash
@pytest.mark.parametrize("step", ["planned", "hosted", "sealing", "opened"])
async def test_metaserver_killed_after_any_step(cluster: Cluster, step: str):
    """The move continues in its state, a second move is refused meanwhile, and no logic offset is
    missing.
    """
    await cluster.create("cut", partitions=1, static=True)
    program = cluster.meta_program
    async with (
        Load(cluster.meta, "cut", keys=30, ttl_ms=TTL_MS) as load,
        meta_of(cluster) as meta,
        QueueReader(cluster.meta, subject="cut") as reader,
    ):
        await load.progress(200)
        (queue,) = await reader.queues()
        place, to = queue.segments[-1].partition, other(queue)
        program.restart_to_die_after(step)
        ask = Reshape(kind=OperationKind.MOVE, partition_ids=(place.partition_id,), broker_group=to)
        with contextlib.suppress(UnreachableError):
            await begin(meta, ask)
        await program.died()
        program.restart()
        (view,) = (await meta.call(endpoints.OPERATIONS, subject="cut")).operations
        if view.state is OperationState.PLAN:  # refused, or too late for the same partition
            with raises((Reason.OPERATION_RUNNING, PartitionUnknownError)):
                await meta.call(endpoints.RESHAPE, ask)
        await done_operation(meta, view)
        await load.progress(200)
        await load.finish()
        (queue,) = await reader.queues()
        assert contiguous(queue)
        assert len(queue.segments) == 2
    await check(cluster, load, "cut")


@pytest.mark.crash
async def test_static_move_waits_for_a_dead_source(cluster: Cluster):
    """A static subject evacuated without its source waits, best_tried or not, and continues when
    the source is back.
    """
    await cluster.create("held", partitions=1, static=True, strategy="best_tried")
    async with (
        Load(cluster.meta, "held", keys=30) as load,
        meta_of(cluster) as meta,
        QueueReader(cluster.meta, subject="held") as reader,
    ):
        await load.progress(200)
        await load.finish()
        (before,) = await reader.queues()
        source = before.segments[-1].partition.broker_group
        broker = cluster.brokers[int(source[1:]) - 1]
        broker.kill()
        until = time.monotonic() + 60
        while any(
            broker["available"] and broker["broker_group"] == source
            for broker in (await meta.health()).details["brokers"]
        ):
            assert time.monotonic() < until
            await asyncio.sleep(0.05)
        ask = Reshape(kind=OperationKind.EVACUATE, broker_group=source, without_source=True)
        view = await begin(meta, ask)
        await asyncio.sleep(1)
        (held,) = (await meta.call(endpoints.OPERATIONS, subject="held")).operations
        assert held.state is OperationState.PLAN
        assert source in held.problem
        assert (await reader.queues())[0].segments[-1].logic_end is None
        broker.restart()
        await done_operation(meta, view)
        (queue,) = await reader.queues()
        assert contiguous(queue)
        assert await reader.bounds(0) == (0, load.count)


async def test_static_queue_survives_a_lost_database(tmp_path: Path):
    """The rebuilt subject is static and has the same queues and logic offsets; the next move
    continues them.
    """
    cluster = Cluster(tmp_path)
    try:
        await cluster.create("lost", partitions=2, static=True)
        async with (
            Load(cluster.meta, "lost", keys=30, ttl_ms=TTL_MS) as load,
            QueueReader(cluster.meta, subject="lost") as reader,
            meta_of(cluster) as meta,
        ):

            async def move() -> None:
                await load.progress(200)
                for queue in await reader.queues():
                    ids = (queue.segments[-1].partition.partition_id,)
                    ask = Reshape(
                        kind=OperationKind.MOVE, partition_ids=ids, broker_group=other(queue)
                    )
                    await done_operation(meta, await begin(meta, ask))

            await move()
            await move()
            before = await reader.queues()
            await rebuild_lost_database(cluster, tmp_path)
            assert places(await reader.queues()) == places(before)
            assert (await meta.call(endpoints.SUBJECT, subject="lost")).static
            await move()
            await load.finish()
            load.check()
            assert all(contiguous(queue) for queue in await reader.queues())
            verified = (await meta.call(endpoints.VERIFY)).checks
            assert not [check.violations for check in verified if check.violations]
    finally:
        cluster.stop()


def places(queues: list[QueueView]) -> list[list[tuple[int, int, int | None]]]:
    """Partition id, logic start and logic end of each segment of each queue."""
    return [
        [
            (segment.partition.partition_id, segment.partition.logic_start, segment.logic_end)
            for segment in queue.segments
        ]
        for queue in queues
    ]
