"""A reader that follows a subject in a virtual cluster, while a broker stands on an older copy of its data folder."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import pytest

from keylane import Admin, OffsetOutOfRangeError, Producer, Reader
from keylane.testing import VirtualCluster
from keylane.testing.machines.disk import SimDisk
from keylane.testing.programs import BrokerProgram

LONG_S = 120
"""Much longer than a reader waits for what a broker lacks."""


@dataclass
class Following:
    """A reader that has read both partitions of `orders` to their end."""

    task: asyncio.Task[None]
    """Its iteration."""
    seen: list[bytes]
    """The values that it gave."""
    producer: Producer
    first: BrokerProgram
    """Of the partition with the lower id: it is asked first."""
    second: BrokerProgram
    key: bytes
    """Of messages in the partition of `second`."""
    newest: SimDisk
    """The disk of `second`, which is stopped."""

    async def move_second_to(self, disk: SimDisk) -> None:
        await self.second.stop()
        self.second._disk = disk
        self.second.start()


@asynccontextmanager
async def following(cluster: VirtualCluster) -> AsyncIterator[Following]:
    """A reader that follows, and the second broker on a copy of its disk that has one message less than the reader has read."""
    await cluster.create_subject("orders", partitions=2)
    async with (
        Producer(cluster.address) as producer,
        Admin(cluster.address) as admin,
        Reader(cluster.address, "orders", follow=True) as reader,
    ):
        seen: list[bytes] = []

        async def follow() -> None:
            async for message in reader:
                seen.append(message.value)  # noqa: PERF401  (what came is looked at meanwhile)

        route = await admin.describe_subject("orders")
        brokers = {broker.group: broker for broker in cluster.brokers}
        first, second = (
            brokers[each.broker_group]
            for each in sorted(route.partitions, key=lambda each: each.partition_id)
        )
        last_id = max(each.partition_id for each in route.partitions)
        keys = {}
        for number in range(16):
            key = b"%d" % number
            keys[(await producer.send("orders", b"early", key=key)).partition_id] = key
        task = asyncio.create_task(follow())
        await second.stop()
        older = second._disk.after_crash(random.Random(1))
        second._disk = second._disk.after_crash(random.Random(1))
        second.start()
        await producer.send("orders", b"late", key=keys[last_id])
        await asyncio.sleep(5)
        assert len(seen) == 17
        await second.stop()
        newest = second._disk.after_crash(random.Random(1))
        second._disk = older
        yield Following(task, seen, producer, first, second, keys[last_id], newest)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def test_following_reader_gives_a_broker_ten_seconds_when_it_comes_back_on_an_older_copy():
    """It was away for long, which does not count."""
    cluster = VirtualCluster(brokers=2)

    async def story() -> None:
        async with following(cluster) as reader:
            await asyncio.sleep(LONG_S)
            reader.second.start()
            await asyncio.sleep(5)
            assert not reader.task.done()
            await reader.move_second_to(reader.newest)
            await reader.producer.send("orders", b"after", key=reader.key)
            await asyncio.sleep(5)
            assert reader.seen[-1] == b"after"

    cluster.run(story)


def test_following_reader_gives_a_broker_ten_seconds_when_another_one_is_away_for_good():
    cluster = VirtualCluster(brokers=2)

    async def story() -> None:
        async with following(cluster) as reader:
            reader.second._disk, older = reader.newest, reader.second._disk
            reader.second.start()
            reader.first.crash()
            await asyncio.sleep(LONG_S)
            await reader.second.stop()
            newest, reader.second._disk = reader.second._disk, older
            reader.second.start()
            await asyncio.sleep(5)
            assert not reader.task.done()
            await reader.move_second_to(newest)
            await reader.producer.send("orders", b"after", key=reader.key)
            await asyncio.sleep(5)
            assert reader.seen[-1] == b"after"

    cluster.run(story)


def test_following_reader_raises_what_a_broker_lacks_when_another_one_is_away_for_good():
    """The broker that is away is asked first."""
    cluster = VirtualCluster(brokers=2)

    async def story() -> None:
        async with following(cluster) as reader:
            reader.first.crash()
            reader.second.start()
            with pytest.raises(OffsetOutOfRangeError):
                async with asyncio.timeout(30):
                    await reader.task

    cluster.run(story)
