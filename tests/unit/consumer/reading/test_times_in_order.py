"""Readers by time where the calendar of a partition's broker is behind that of the partition which it continues."""

from __future__ import annotations

import asyncio
from datetime import datetime

from keylane import Admin, Producer, QueueReader, Reader
from keylane.protocol.control import TimeBound
from keylane.testing import VirtualCluster

BEHIND_MS = 3_600_000


async def moved(cluster: VirtualCluster, *, static: bool = False) -> datetime:
    """
    Send 1 to 4 under one key; between 2 and 3 their partition moves to a broker that is an hour behind.

    Returns:
        A time between 1 and 2.
    """
    await cluster.create_subject("orders", partitions=1, static=static)
    async with Producer(cluster.address) as producer, Admin(cluster.address) as admin:
        await producer.send("orders", b"1", key=b"k")
        (partition,) = (await admin.describe_subject("orders")).partitions
        await asyncio.sleep(60)
        between = cluster.now()
        await asyncio.sleep(60)
        await producer.send("orders", b"2", key=b"k")
        other = 1 - int(partition.broker_group[1:])
        cluster.brokers[other].clock.wall_jump_ms = -BEHIND_MS
        await admin.wait(await admin.move([partition.partition_id], to=f"g{other}"))
        for value in (b"3", b"4"):
            await producer.send("orders", value, key=b"k")
    return between


async def read(cluster: VirtualCluster, **bounds) -> list[bytes]:
    async with Reader(cluster.address, "orders", **bounds) as reader:
        return [message.value async for message in reader]


def test_reader_passes_over_no_message_of_a_key_when_the_child_is_behind_in_time():
    cluster = VirtualCluster(brokers=2)

    async def story() -> None:
        between = await moved(cluster)
        assert await read(cluster, start=between) == [b"2", b"3", b"4"]
        assert await read(cluster, start=between, key=b"k") == [b"2", b"3", b"4"]

    cluster.run(story)


def test_readers_give_each_message_once_when_their_ranges_meet_at_a_time():
    cluster = VirtualCluster(brokers=2)

    async def story() -> None:
        between = await moved(cluster)
        assert await read(cluster, stop=between) == [b"1"]
        assert await read(cluster, start="-2h", stop=between) == [b"1"]

    cluster.run(story)


def test_queue_reader_finds_the_first_message_of_the_queue_when_a_later_partition_is_behind_in_time():
    cluster = VirtualCluster(brokers=2)

    async def story() -> None:
        between = await moved(cluster, static=True)
        at_ms = int(between.timestamp() * 1000)
        async with QueueReader(cluster.address, subject="orders") as reader:
            assert await reader.offset_at(0, at_ms) == 1
            assert await reader.offset_at(0, at_ms, TimeBound.UPPER) == 3

    cluster.run(story)
