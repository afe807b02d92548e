"""Arrow batches of partitions that the consumer has just got."""

from __future__ import annotations

import asyncio

from keylane import Consumer, Producer
from keylane.testing import VirtualCluster, run
from support.consumer_options import consumer_options


async def send_all(cluster: VirtualCluster) -> None:
    await cluster.create_subject("orders", partitions=2)
    async with Producer(cluster.address) as producer:
        for number in range(200):
            producer.send("orders", b"%d" % number, key=b"%d" % (number % 20))
        await producer.flush()


def test_arrow_batch_waits_for_on_assigned_when_it_is_asked_for_first() -> None:
    """Sessions that hand out columns took the place of others, and did not wait."""

    async def story(cluster: VirtualCluster) -> list[str]:
        await send_all(cluster)
        happened: list[str] = []

        async def prepare(_partition_ids: list[int]) -> None:
            await asyncio.sleep(2)
            happened.append("assigned")

        async with Consumer(
            cluster.address,
            **consumer_options(subject="orders", group="g", on_assigned=prepare),
        ) as consumer:
            async for _ in consumer.batches():
                happened.append("batch")
                break
        return happened

    assert run(story) == ["assigned", "batch"]
