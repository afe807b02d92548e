"""A reader that follows a subject in a virtual cluster: what it does about a partition whose messages are gone."""

from __future__ import annotations

import asyncio

from keylane import Admin, Producer, Reader
from keylane.testing import VirtualCluster

TRY_S = 0.05
"""Shorter than a pause after an error."""
TRIES = 200


async def next_value(reader: Reader) -> bytes:
    """The next message's value, for a program that never waits long and asks again."""
    for _ in range(TRIES):
        try:
            async with asyncio.timeout(TRY_S):
                return (await anext(reader)).value
        except TimeoutError:
            pass
    raise AssertionError("the reader gives nothing")


def test_impatient_program_goes_on_behind_a_lost_disk():
    """Its reader looks for what became of the partition before it pauses."""
    cluster = VirtualCluster(brokers=2)

    async def story() -> None:
        await cluster.create_subject("orders", partitions=1)
        async with (
            Producer(cluster.address) as producer,
            Admin(cluster.address) as admin,
            Reader(cluster.address, "orders", follow=True) as reader,
        ):
            receipt = await producer.send("orders", b"before", key=b"k")
            assert await next_value(reader) == b"before"
            (partition,) = (await admin.describe_subject("orders")).partitions
            group = partition.broker_group
            broker = cluster.brokers[int(group[1:])]
            broker.kill()
            await asyncio.sleep(40)
            await admin.evacuate(group, accept_loss=True)
            await producer.send("orders", b"after", key=b"k")
            assert await next_value(reader) == b"after"
            assert reader.positions[receipt.partition_id] == 1

    cluster.run(story)
