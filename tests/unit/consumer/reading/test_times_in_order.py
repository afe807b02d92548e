"""Readers by time, when the clock of a partition's broker is behind that of its parent's broker."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from datetime import datetime, timedelta
from typing import Any

import pytest

from keylane import Admin, Producer, QueueReader, Reader
from keylane.broker.control import BrokerControl
from keylane.errors import WrongBrokerError
from keylane.protocol.control import TimeBound
from keylane.testing import VirtualCluster

BEHIND_MS = 25 * 3_600_000
"""So large that a partition's times start before the end of its parent's: only readers put the
messages in order.
"""
NEARLY_MS = 23 * 3_600_000


async def moved(cluster: VirtualCluster, *, static: bool = False) -> datetime:
    """
    Send 1 to 4 under one key; between 2 and 3 their partition moves to a broker that is 25 hours
    behind.

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


def test_reader_opens_when_a_broker_has_lost_its_place_meanwhile(monkeypatch: pytest.MonkeyPatch):
    """It asks until a metaserver names the broker that has the place."""
    answers = iter([WrongBrokerError("a copy has its place")] * 2)
    find = BrokerControl.find_offset

    async def find_offset(self: BrokerControl, body: None, params: Any) -> Any:
        if error := next(answers, None):
            raise error
        return await find(self, body, params)

    monkeypatch.setattr(BrokerControl, "find_offset", find_offset)
    cluster = VirtualCluster(brokers=2)

    async def story() -> None:
        between = await moved(cluster)
        assert await read(cluster, start=between) == [b"2", b"3", b"4"]

    cluster.run(story)
    assert next(answers, None) is None


def test_readers_give_each_message_once_when_their_ranges_meet_at_a_time():
    cluster = VirtualCluster(brokers=2)

    async def story() -> None:
        between = await moved(cluster)
        assert await read(cluster, stop=between) == [b"1"]
        assert await read(cluster, start="-26h", stop=between) == [b"1"]

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


def reshaped(cluster: VirtualCluster, reshape: Callable[[Admin, int], Awaitable[Any]]) -> None:
    """
    Send 1, read up to a time, reshape the subject, send 2, and read from that time on: each message
    is read once.

    Args:
        reshape: gets the partition's id; all brokers except its own are behind.
    """

    async def story() -> None:
        await cluster.create_subject("orders", partitions=1)
        async with Producer(cluster.address) as producer, Admin(cluster.address) as admin:
            await producer.send("orders", b"1", key=b"k")
            (partition,) = (await admin.describe_subject("orders")).partitions
            for number, broker in enumerate(cluster.brokers):
                if f"g{number}" != partition.broker_group:
                    broker.clock.wall_jump_ms = -NEARLY_MS
            await asyncio.sleep(60)
            between = cluster.now()
            await asyncio.sleep(5)
            before = await read(cluster, stop=between)
            await reshape(admin, int(partition.partition_id))
            for number in range(20):
                await producer.send("orders", b"2", key=b"%d" % number)
        assert before == [b"1"]
        assert await read(cluster, start=between) == [b"2"] * 20
        assert await read(cluster, start=between - timedelta(minutes=2)) == [b"1"] + [b"2"] * 20

    cluster.run(story)


def test_readers_give_each_message_once_when_the_partition_moves_between_their_plans_to_a_broker_that_is_behind():
    """The later message was stored with an earlier time, and used to be in neither range."""
    cluster = VirtualCluster(brokers=2)

    async def move(admin: Admin, partition_id: int) -> None:
        (partition,) = (await admin.describe_subject("orders")).partitions
        other = 1 - int(partition.broker_group[1:])
        await admin.wait(await admin.move([partition_id], to=f"g{other}"))

    reshaped(cluster, move)


def test_readers_give_each_message_once_when_a_resize_and_a_merge_are_between_their_plans():
    """Also if the children of a first resize have no messages when they are merged."""
    cluster = VirtualCluster(brokers=3)

    async def resize(admin: Admin, _partition_id: int) -> None:
        await admin.wait(await admin.resize("orders", 4))
        await admin.wait(await admin.resize("orders", 2))

    reshaped(cluster, resize)


def test_readers_give_each_message_once_when_the_child_is_told_before_its_broker_ends():
    """The start of a child's times is on its broker's disk before the child is open."""
    cluster = VirtualCluster(brokers=2)

    async def move(admin: Admin, partition_id: int) -> None:
        (partition,) = (await admin.describe_subject("orders")).partitions
        other = 1 - int(partition.broker_group[1:])
        await admin.wait(await admin.move([partition_id], to=f"g{other}"))
        cluster.brokers[other].crash()
        await asyncio.sleep(1)
        cluster.brokers[other].start()

    reshaped(cluster, move)
