"""A reader that follows a subject in a virtual cluster, when the messages of a partition
are gone.
"""

from __future__ import annotations

import asyncio

import pytest

from keylane import Admin, ClosedError, Producer, Reader
from keylane.errors import SubjectDeletedError
from keylane.protocol.frames import Read, Request
from keylane.rpc.client import BrokerClient
from keylane.testing import VirtualCluster

TRY_S = 0.05
"""Shorter than a pause after an error."""
TRIES = 200


async def next_value(reader: Reader) -> bytes:
    """Return the next message's value, as a program that never waits long but keeps trying."""
    for _ in range(TRIES):
        try:
            async with asyncio.timeout(TRY_S):
                return (await anext(reader)).value
        except TimeoutError:
            pass
    raise AssertionError("the reader gives nothing")


def test_impatient_program_goes_on_behind_a_lost_disk():
    """Its reader fetches the partition's state before it pauses."""
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


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[Read]:
    """Return the reads that were sent."""
    sent: list[Read] = []
    send = BrokerClient._call

    async def note(self: BrokerClient, request: Request, payload: bytes, wait_ms: int):
        if isinstance(request, Read):
            sent.append(request)
        return await send(self, request, payload, wait_ms)

    monkeypatch.setattr(BrokerClient, "_call", note)
    return sent


def test_reader_gets_a_message_at_once_and_asks_seldom_when_it_follows(reads: list[Read]):
    """With 64 partitions read to their end it used to send about 290 requests a second, and waited
    up to 200 ms.
    """
    cluster = VirtualCluster(brokers=1)

    async def story() -> None:
        await cluster.create_subject("orders", partitions=64)
        async with (
            Producer(cluster.address) as producer,
            Reader(cluster.address, "orders", follow=True) as reader,
        ):
            loop = asyncio.get_running_loop()
            following = asyncio.create_task(anext(reader))
            await asyncio.sleep(5)
            reads.clear()
            await asyncio.sleep(60)
            assert len(reads) <= 64 * 60 / 5 + 64
            for number in range(20):
                await producer.send("orders", b"%d" % number, key=b"%d" % number)
                sent_s = loop.time()
                assert (await following).value == b"%d" % number
                assert loop.time() - sent_s < 0.05
                following = asyncio.create_task(anext(reader))
            following.cancel()

    cluster.run(story)


def test_reader_goes_on_at_once_when_the_partitions_change():
    """The long poll of a partition ends when the partition is sealed."""
    cluster = VirtualCluster(brokers=2)

    async def story() -> None:
        await cluster.create_subject("orders", partitions=1)
        async with (
            Producer(cluster.address) as producer,
            Admin(cluster.address) as admin,
            Reader(cluster.address, "orders", follow=True) as reader,
        ):
            await producer.send("orders", b"before", key=b"k")
            assert await next_value(reader) == b"before"
            following = asyncio.create_task(anext(reader))
            await asyncio.sleep(1)
            await admin.resize("orders", 3)
            await producer.send("orders", b"after", key=b"k")
            async with asyncio.timeout(2):
                assert (await following).value == b"after"

    cluster.run(story)


def test_wait_of_a_reader_ends_when_its_subject_is_deleted():
    cluster = VirtualCluster(brokers=1)

    async def story() -> None:
        await cluster.create_subject("orders", partitions=2)
        async with (
            Admin(cluster.address) as admin,
            Reader(cluster.address, "orders", follow=True) as reader,
        ):
            following = asyncio.create_task(anext(reader))
            await asyncio.sleep(1)
            await admin.delete_subject("orders")
            with pytest.raises(SubjectDeletedError):
                async with asyncio.timeout(3):
                    await following

    cluster.run(story)


def test_wait_of_a_reader_ends_when_another_task_closes_it():
    """None of its tasks is left."""
    cluster = VirtualCluster(brokers=1)

    async def story() -> None:
        await cluster.create_subject("orders", partitions=4)
        tasks = asyncio.all_tasks()
        reader: Reader = Reader(cluster.address, "orders", follow=True)
        async with reader:
            following = asyncio.create_task(anext(reader))
            await asyncio.sleep(1)
        with pytest.raises(ClosedError):
            async with asyncio.timeout(1):
                await following
        assert not {each for each in asyncio.all_tasks() - tasks if "read " in each.get_name()}

    cluster.run(story)
