"""A reader that follows a subject in a virtual cluster, while a broker runs on an older copy of its
data folder.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import pytest

from keylane import Admin, Producer, Reader
from keylane.errors import OffsetOutOfRangeError
from keylane.testing import VirtualCluster
from keylane.testing.programs import BrokerProgram

LONG_S = 120
"""Much longer than a reader waits for messages that a broker lacks."""
SHORT_S = 6
"""Shorter than that, but longer than the pause between two attempts."""


@dataclass
class FollowingReader:
    """A reader that has read both partitions of `orders` to their end."""

    task: asyncio.Task[None]
    """The task that iterates."""
    seen: list[bytes]
    """The values that the reader returned."""
    producer: Producer
    brokers: tuple[BrokerProgram, BrokerProgram]
    """The brokers in the order of their partitions' ids: the first one is read first."""
    keys: tuple[bytes, bytes]
    """One key of each partition."""

    async def lose_the_last_message(self, index: int) -> None:
        """Kill a broker and replace its disk by a copy with one message less than the reader has
        read.
        """
        broker = self.brokers[index]
        older = broker.disk.disk_after_crash(random.Random(1))
        await self.producer.send("orders", b"late", key=self.keys[index])
        await asyncio.sleep(0.05)
        assert self.seen[-1] == b"late"
        broker.kill()
        broker.disk = older

    async def raises_what_a_broker_lacks(self) -> None:
        with pytest.raises(OffsetOutOfRangeError):
            async with asyncio.timeout(30):
                await self.task


@asynccontextmanager
async def following(cluster: VirtualCluster) -> AsyncIterator[FollowingReader]:
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
        groups = {each.partition_id: each.broker_group for each in route.partitions}
        by_group = {broker.group: broker for broker in cluster.brokers}
        first, second = (by_group[groups[number]] for number in sorted(groups))
        key_of: dict[int, bytes] = {}
        for number in range(16):
            key = b"%d" % number
            key_of[(await producer.send("orders", b"early", key=key)).partition_id] = key
        low, high = (key_of[number] for number in sorted(groups))
        task = asyncio.create_task(follow())
        await asyncio.sleep(5)
        yield FollowingReader(task, seen, producer, (first, second), (low, high))
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def test_following_reader_gives_a_broker_ten_seconds_when_it_comes_back_on_an_older_copy():
    """The long time for which it was down does not count."""
    cluster = VirtualCluster(brokers=2)

    async def story() -> None:
        async with following(cluster) as reader:
            await reader.lose_the_last_message(0)
            await asyncio.sleep(LONG_S)
            reader.brokers[0].start()
            await asyncio.sleep(SHORT_S)
            assert not reader.task.done()
            await reader.raises_what_a_broker_lacks()

    cluster.run(story)


def test_following_reader_gives_a_broker_ten_seconds_when_another_one_is_away_for_good():
    cluster = VirtualCluster(brokers=2)

    async def story() -> None:
        async with following(cluster) as reader:
            reader.brokers[1].crash()
            await asyncio.sleep(LONG_S)
            await reader.lose_the_last_message(0)
            reader.brokers[0].start()
            await asyncio.sleep(SHORT_S)
            assert not reader.task.done()
            await reader.raises_what_a_broker_lacks()

    cluster.run(story)


def test_following_reader_raises_what_a_broker_lacks_when_another_one_is_away_for_good():
    """The broker that is down is read first."""
    cluster = VirtualCluster(brokers=2)

    async def story() -> None:
        async with following(cluster) as reader:
            reader.brokers[0].crash()
            await reader.lose_the_last_message(1)
            reader.brokers[1].start()
            await reader.raises_what_a_broker_lacks()

    cluster.run(story)
