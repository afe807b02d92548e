"""A consumer that is cancelled while it opens has no place in its group afterwards."""

from __future__ import annotations

import asyncio
import time

import pytest

from keylane import Admin, Consumer, Message, Producer
from keylane.consumer import ConsumerSettings
from support.cluster import Cluster, eventually

LONG = ConsumerSettings(ttl_ms=30_000)
DELAYS_S = [0.002, 0.005, 0.01, 0.02, 0.04, 0.08]


@pytest.mark.parametrize("partitions", [4, 64])
async def test_next_consumer_gets_everything_at_once_after_openings_were_cancelled(
    shared_cluster: Cluster, partitions: int
):
    """Long before the ttl of those that were cancelled."""
    subject = f"cancelled-{partitions}"
    await shared_cluster.create(subject, partitions=partitions)
    async with Producer(shared_cluster.meta) as producer:
        for number in range(200):
            producer.send(subject, b"%d" % number, key=b"k%d" % number)
    handled: set[bytes] = set()

    async def handle(message: Message) -> None:
        handled.add(message.value)

    for delay_s in DELAYS_S:
        consumer = Consumer(
            shared_cluster.meta, subject=subject, group="g", handler=handle, settings=LONG
        )
        opening = asyncio.create_task(consumer.__aenter__())
        await asyncio.sleep(delay_s)
        opening.cancel()
        if (await asyncio.gather(opening, return_exceptions=True))[0] is consumer:
            await consumer.close()  # it was open before the cancel came
    began = time.monotonic()
    async with Consumer(
        shared_cluster.meta, subject=subject, group="g", handler=handle, settings=LONG
    ):
        await eventually(lambda: len(handled) == 200)
        assert time.monotonic() - began < LONG.ttl_ms / 1000 / 3
        async with Admin(shared_cluster.meta) as admin:
            described = await admin.describe_group(subject, "g")
            assert described.sessions == 1
