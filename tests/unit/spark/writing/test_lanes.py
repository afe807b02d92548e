"""Lanes of a task, over a virtual cluster: every row stored once and in order, whatever the order
of events.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterable
from itertools import product
from typing import Any

import pyarrow as pa
import pytest

from keylane import Admin
from keylane.protocol.clock import SystemClock
from keylane.protocol.errors import KeylaneError, SequenceGapError
from keylane.protocol.routing import logical_partition
from keylane.rpc.client import MetaClient
from keylane.rpc.environment import environment_of
from keylane.spark.writing.lanes import QUEUE_MAX, Lane, TaskSender
from keylane.spark.writing.rows import BATCH_ROWS, RowReader, Span
from keylane.testing import VirtualCluster, run
from sim.machines.store import facts

CHUNK = 3_000


@pytest.mark.parametrize("seed", range(12))
def test_sender_stores_each_row_once_and_ends(seed: int):
    """More batches than a lane takes at once, cut off and repeated: the waits end, the rows are in
    order.
    """
    count = BATCH_ROWS * (QUEUE_MAX + 3)

    async def story(cluster: VirtualCluster) -> None:
        await cluster.create_subject("rows", partitions=2)
        await write(cluster, count // 2)  # the task is killed
        assert await write(cluster, count) == count
        stored = [int(message.value) for message in await cluster.messages("rows", key=b"a")]
        assert stored == list(range(0, count, 2))
        assert len(await cluster.messages("rows")) == count

    async def write(cluster: VirtualCluster, upto: int) -> int:
        environment = environment_of(None)
        sender = TaskSender(
            environment.network,
            MetaClient(environment.network, [cluster.address]),
            "rows",
            identity=("job", 0),
            task=0,
            sent_at_ns=1,
            timeout_ms=20_000,
            clock=environment.clock,
            rng=random.Random(seed),
        )
        reader = RowReader(salt=b"job", message_bytes_max=1 << 20, task=0)
        try:
            await sender.open()
            for first in range(0, upto, CHUNK):
                numbers = range(first, min(first + CHUNK, upto))
                values = [b"%d" % number for number in numbers]
                keys = [b"ab"[number % 2 : number % 2 + 1] for number in numbers]
                await sender.put(reader.read(pa.record_batch({"key": keys, "value": values})))
            if upto == count:
                await sender.finish()
        finally:
            await sender.close()
        return sum(sender.stored.values())

    run(story, seed=seed)


def key_of(start: int, end: int) -> bytes:
    """A key of a logical partition in [start, end)."""
    keys = (b"k%d" % number for number in range(10_000))
    return next(key for key in keys if start <= logical_partition(key) < end)


async def write_rows(cluster: VirtualCluster, keys: list[bytes], *, task: int) -> int:
    """Store a row of each key, as an attempt of a task; returns how many rows are stored."""
    environment = environment_of(None)
    sender = TaskSender(
        environment.network,
        MetaClient(environment.network, [cluster.address]),
        "rows",
        identity=("stream", task),
        task=task,
        sent_at_ns=1,
        timeout_ms=20_000,
        clock=environment.clock,
        rng=random.Random(task),
    )
    reader = RowReader(salt=b"job", message_bytes_max=1 << 20, task=task)
    values = [b"%d.%d" % (task, number) for number in range(len(keys))]
    try:
        await sender.open()
        await sender.put(reader.read(pa.record_batch({"key": keys, "value": values})))
        await sender.finish()
    finally:
        await sender.close()
    return sum(sender.stored.values())


async def resize(cluster: VirtualCluster, count: int) -> None:
    async with Admin(cluster.address) as admin:
        await admin.wait(await admin.resize("rows", count))


async def wait_for(cluster: VirtualCluster, *ids: int) -> None:
    """Wait until these partitions alone are in the route."""
    async with Admin(cluster.address) as admin:

        async def left() -> bool:
            described = await admin.describe_subject("rows")
            return {int(each.partition_id) for each in described.partitions} == {*ids}

        await cluster.until(left, within_s=1_000, every_s=10)


def test_sender_stores_all_rows_when_one_of_two_parents_has_expired():
    """The child takes over at once what an empty parent had, and behind the other one what that
    had.
    """

    async def story(cluster: VirtualCluster) -> None:
        await cluster.create_subject("rows", partitions=2)
        low, high = key_of(0, 512), key_of(512, 1_024)
        assert await write_rows(cluster, [high], task=0) == 1
        await resize(cluster, 1)
        await wait_for(cluster, 2, 3)
        assert await write_rows(cluster, [low, high, low], task=1) == 3
        assert await write_rows(cluster, [low, high, low], task=1) == 3
        stored = sorted(message.value for message in await cluster.messages("rows"))
        assert stored == [b"0.0", b"1.0", b"1.1", b"1.2"]

    run(story, seed=1)


@pytest.mark.parametrize("again", [1, 3])
def test_sender_stores_each_row_once_when_a_parent_expires_between_two_attempts(again: int):
    """The numbers of a row do not depend on the sealed partitions that it has passed."""

    async def story(cluster: VirtualCluster) -> None:
        await cluster.create_subject("rows", partitions=2)
        low, high = key_of(0, 512), key_of(512, 1_024)
        await write_rows(cluster, [high], task=0)
        await resize(cluster, again)
        children = range(3, 3 + again)
        assert await write_rows(cluster, [low, high, low], task=1) == 3
        await wait_for(cluster, 2, *children)
        assert await write_rows(cluster, [low, high, low], task=1) == 3
        stored = sorted(message.value for message in await cluster.messages("rows"))
        assert stored == [b"0.0", b"1.0", b"1.1", b"1.2"]

    run(story, seed=1)


@pytest.mark.parametrize("partitions", [2, 3])
def test_sender_stores_each_row_once_when_all_merged_parents_expire_between_two_attempts(
    partitions: int,
):
    """Lanes end where the ranges of expired partitions end, so the numbers of a row stay."""

    async def story(cluster: VirtualCluster) -> None:
        await cluster.create_subject("rows", partitions=partitions)
        low, high = key_of(0, 341), key_of(683, 1_024)
        await resize(cluster, 1)
        merged = partitions + 1
        assert await write_rows(cluster, [low, high, low], task=1) == 3
        await wait_for(cluster, merged)
        assert await write_rows(cluster, [low, high, low], task=1) == 3
        await resize(cluster, 2)
        assert await write_rows(cluster, [low, high, low], task=1) == 3
        assert await write_rows(cluster, [high, low, high], task=2) == 3
        stored = sorted(message.value for message in await cluster.messages("rows"))
        assert stored == [b"1.0", b"1.1", b"1.2", b"2.0", b"2.1", b"2.2"]

    run(story, seed=1)


class TickingBroker:
    """A broker, and its channel, that answers each append after its number of turns of the event
    loop.
    """

    def __init__(self, *turns: int, refusals: Iterable[KeylaneError | None] = ()) -> None:
        self._turns = list(turns)
        self._refusals = list(refusals)
        """What the first calls meet; None: they are answered."""

    async def channel(self) -> TickingBroker:
        return self

    async def call(self, *_request: Any, **_options: Any) -> None:
        refusal = self._refusals.pop(0) if self._refusals else None
        for _ in range(self._turns.pop(0) if self._turns else 0):
            await asyncio.sleep(0)
        if refusal is not None:
            raise refusal

    async def close(self) -> None:
        """Nothing is open."""


async def finished(broker: TickingBroker, *, turns: int = 0) -> int:
    """How many rows of two batches are stored, when the end is waited for after `turns` turns of
    the event loop.
    """
    environment = environment_of(None)
    sender = TaskSender(
        environment.network,
        MetaClient(environment.network, ["127.0.0.1:1"]),
        "rows",
        identity=("job", 0),
        task=0,
        sent_at_ns=1,
        timeout_ms=1_000,
        clock=SystemClock(),
        rng=random.Random(0),
    )
    sender.broker_of = lambda _partition: broker  # type: ignore[assignment,method-assign,return-value]
    sender.refresh = broker.close  # type: ignore[method-assign]  # the route stays
    lane = Lane(sender, facts(1).partition, (0, 1_024))
    reader = RowReader(salt=b"job", message_bytes_max=1 << 20, task=0)
    whole = {"key": [b"k"] * BATCH_ROWS, "value": [b"v"] * BATCH_ROWS}
    for _ in range(2):
        lane.add(Span(reader.read(pa.record_batch(whole)), 0, BATCH_ROWS))
    for _ in range(turns):
        await asyncio.sleep(0)
    try:
        await asyncio.wait_for(lane.finish(), 5)
    finally:
        lane.cancel()
    return sender.stored[1]


@pytest.mark.parametrize("before", range(4))
def test_lane_ends_whenever_its_last_answers_come(before: int):
    """The end of a wait is never lost between the lane's task and the task that fills the lane."""

    async def finish_all() -> None:
        for turns in product(range(7), repeat=2):
            assert await finished(TickingBroker(*turns), turns=before) == 2 * BATCH_ROWS

    asyncio.run(finish_all())


def test_lane_sends_a_batch_again_that_was_refused_before_the_first_was_stored():
    """A gap says what the broker had when it looked; only the first batch that is sent shows
    whether it forgot rows.
    """
    gap = SequenceGapError(expected=0, sequence=BATCH_ROWS, count=BATCH_ROWS)
    assert asyncio.run(finished(TickingBroker(refusals=[None, gap]))) == 2 * BATCH_ROWS
    with pytest.raises(SequenceGapError):
        asyncio.run(finished(TickingBroker(refusals=[None, gap, gap])))
