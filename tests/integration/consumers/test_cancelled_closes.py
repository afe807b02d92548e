"""A close whose caller is cancelled continues to its end, and a second close waits for it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable
from typing import Any

import pytest

from keylane import Consumer, Message, Producer
from keylane.consumer import ConsumerSettings
from support.cluster import Cluster, eventually

TTL_MS = 1_500
SLOW = ConsumerSettings(handover_ms=60_000, ttl_ms=TTL_MS)


async def cancelled_after(work: Awaitable[Any], turns: int) -> None:
    """Wait for `work`, and be cancelled after `turns` turns of the event loop."""
    task = asyncio.ensure_future(work)
    for _ in range(turns):
        await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task])


async def test_cancelled_close_keeps_the_partition_while_a_handler_runs(
    shared_cluster: Cluster,
):
    """The second close ends with the handler, and only then another consumer gets the partition."""
    await shared_cluster.create("cancelled-closes", partitions=1)
    begun, gate, ended = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def handle(_message: Message) -> None:
        begun.set()
        while not gate.is_set():  # it ignores cancellations
            with contextlib.suppress(asyncio.CancelledError):
                await gate.wait()
        ended.set()

    async def handle_next(_message: Message) -> None:
        assert ended.is_set(), "handled while another consumer is at it"

    shared = {"subject": "cancelled-closes", "group": "g", "settings": SLOW}
    first = Consumer(shared_cluster.meta, handler=handle, **shared)
    second = Consumer(shared_cluster.meta, handler=handle_next, **shared)
    async with asyncio.timeout(60), first, second:
        await eventually(lambda: first.assignment or second.assignment)
        holder = first if first.assignment else second
        if holder is second:  # let the first own it
            await second.suspend()
            await eventually(lambda: first.assignment)
            await second.resume()
        async with Producer(shared_cluster.meta) as producer:
            await producer.send("cancelled-closes", b"v", key=b"k")
        await begun.wait()
        await cancelled_after(first.close(), 3)
        closing = asyncio.create_task(first.close())
        await asyncio.sleep(2 * TTL_MS / 1000)
        assert not closing.done()
        assert second.assignment == []
        gate.set()
        await closing
        await eventually(lambda: second.assignment)


@pytest.mark.parametrize("turns", [0, 1, 2, 3, 5])
async def test_cancelled_producer_close_answers_every_message_and_opens_again(
    shared_cluster: Cluster, turns: int
):
    """Wherever the cancellation comes, every future is done, and the same producer opens again."""
    subject = f"cancelled-closes-{turns}"
    await shared_cluster.create(subject, partitions=2)
    producer = Producer(shared_cluster.meta)
    async with asyncio.timeout(60):
        await producer.__aenter__()
        await producer.send(subject, b"first", key=b"k")
        futures = [producer.send(subject, b"%d" % number, key=b"k") for number in range(10)]
        await cancelled_after(producer.close(flush=False), turns)
        await producer.close()
        await asyncio.gather(*futures, return_exceptions=True)
        assert all(future.done() for future in futures)
        async with producer:
            assert (await producer.send(subject, b"last", key=b"k")).offset >= 0
