"""Partitions that are wanted by another consumer while the body of an iteration runs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from keylane import Consumer, Message, Producer
from keylane.consumer import ConsumerSettings
from keylane.protocol.errors import LeaseLostError
from support.cluster import Cluster, eventually

TTL_MS = 1_500
HASTY = ConsumerSettings(handover_ms=50, ttl_ms=TTL_MS, call_timeout_ms=1_000)
SENT = 40


async def send(meta: str, subject: str) -> None:
    """Messages of ten keys, which lie in both partitions."""
    async with Producer(meta) as producer:
        for number in range(SENT):
            producer.send(subject, b"%d" % number, key=b"k%d" % (number % 10))


async def first_of_each(consumer: Consumer) -> dict[int, Message]:
    """Take messages one by one, and ack all but the first of each of two partitions."""
    taken: dict[int, Message] = {}
    while len(taken) < 2:
        message = await anext(consumer)
        if taken.setdefault(message.partition_id, message) is not message:
            await message.ack()
    return taken


@asynccontextmanager
async def two_of(cluster: Cluster, subject: str) -> AsyncIterator[tuple[Consumer, Consumer]]:
    """A consumer that owns both partitions, with messages in them, and a second one that has not
    joined.
    """
    await cluster.create(subject, partitions=2)
    first, second = (
        Consumer(cluster.meta, subject=subject, group="g", settings=HASTY) for _ in range(2)
    )
    async with asyncio.timeout(90), first:
        await eventually(lambda: len(first.assignment) == 2)
        await send(cluster.meta, subject)
        yield first, second


async def test_loop_body_may_take_longer_than_handover_and_lease(shared_cluster: Cluster):
    """Another consumer gets no message of a partition before the body has acked its own; then it
    gets the next ones.
    """
    async with two_of(shared_cluster, "in-the-body") as (first, second):
        held = await first_of_each(first)
        async with second:
            await eventually(lambda: len(first.assignment) == 1)
            (gone,) = held.keys() - {kept.partition_id for kept in first.assignment}
            await send(shared_cluster.meta, "in-the-body")
            await asyncio.sleep(2 * TTL_MS / 1000)
            assert second.assignment == []
            await held[gone].ack()
            await eventually(lambda: second.assignment)
            following = await anext(second)
    assert following.partition_id == gone
    assert following.offset > held[gone].offset


async def test_messages_passed_over_are_redelivered_to_the_next_owner(shared_cluster: Cluster):
    """A loop that continues without an ack delays a hand-over by `handover_ms` at most."""
    async with two_of(shared_cluster, "passed-over") as (first, second):
        held: dict[int, Message] = {}

        async def drain() -> None:
            held.update(await first_of_each(first))
            async for message in first:
                await message.ack()

        draining = asyncio.create_task(drain())
        await eventually(lambda: len(held) == 2)
        async with second:
            await eventually(lambda: second.assignment)
            again = await anext(second)
        assert again.value == held[again.partition_id].value
        with pytest.raises(LeaseLostError):
            await held[again.partition_id].ack()
        draining.cancel()


async def test_loop_body_may_suspend_its_consumer(shared_cluster: Cluster):
    """The call returns, and the body may ack its message afterwards; it is not redelivered."""
    meta = shared_cluster.meta
    await shared_cluster.create("suspending", partitions=1)
    async with Producer(meta) as producer:
        for number in range(2):
            await producer.send("suspending", b"%d" % number, key=b"k")
    first, second = (
        Consumer(meta, subject="suspending", group="g", settings=HASTY) for _ in range(2)
    )
    async with asyncio.timeout(90), first:
        message = await anext(first)
        await first.suspend()
        await message.ack()
        async with second:
            assert (await anext(second)).value == b"1"
