"""How long a reader waits for servers that do not answer, in a virtual cluster."""

from __future__ import annotations

import asyncio
import logging

import pytest

from keylane import Admin, ClosedError, NotSentError, Producer, Reader
from keylane.consumer.reading.patience import Patience
from keylane.protocol.errors import ForeignServerError, OffsetOutOfRangeError
from keylane.protocol.limits import READ_GIVE_UP_MS
from keylane.testing import VirtualCluster


def test_following_reader_goes_on_when_a_broker_was_down_for_minutes(caplog):
    """Messages of the other broker come meanwhile, without the pauses between tries."""
    cluster = VirtualCluster(brokers=2)
    late_s: list[float] = []

    async def story() -> None:
        await cluster.create_subject("orders", partitions=8)
        loop = asyncio.get_running_loop()
        seen: list[bytes] = []

        async def follow(reader: Reader) -> None:
            async for message in reader:
                seen.append(message.value)
                if message.value.startswith(b"at "):
                    late_s.append(loop.time() - float(message.value[3:]))

        async with (
            Reader(cluster.address, "orders", follow=True) as reader,
            Producer(cluster.address) as producer,
            Admin(cluster.address) as admin,
        ):
            following = asyncio.create_task(follow(reader))
            keys = [b"%d" % number for number in range(32)]
            sent = {key: await producer.send("orders", b"before " + key, key=key) for key in keys}
            route = await admin.describe_subject("orders")
            alive = {each.partition_id for each in route.partitions if each.broker_group == "g1"}
            key = next(key for key, receipt in sent.items() if receipt.partition_id in alive)
            cluster.brokers[0].crash()
            for _ in range(300):
                await producer.send("orders", b"at %f" % loop.time(), key=key)
                await asyncio.sleep(1)
            assert not following.done()
            cluster.brokers[0].start()
            await asyncio.sleep(10)
            for key in keys:
                await producer.send("orders", b"after " + key, key=key)
            await asyncio.sleep(5)
            assert {b"after " + key for key in keys} <= set(seen)
            assert len(seen) == len(set(seen))
            following.cancel()

    with caplog.at_level(logging.WARNING, "keylane.consumer"):
        cluster.run(story)
    told = [each.getMessage() for each in caplog.records if "reader of" in each.getMessage()]
    assert 3 <= len(told) <= 8
    assert "has waited for" in told[0]
    assert "goes on after" in told[-1]
    assert sorted(late_s)[len(late_s) * 9 // 10] < 0.2


def test_reader_that_does_not_follow_gives_up_when_a_broker_stays_down():
    cluster = VirtualCluster(brokers=1)

    async def story() -> None:
        await cluster.create_subject("orders", partitions=2)
        async with Producer(cluster.address) as producer:
            await producer.send("orders", b"1", key=b"k")
        async with Reader(cluster.address, "orders") as reader:
            cluster.brokers[0].crash()
            with pytest.raises(NotSentError):
                async with asyncio.timeout(30):
                    await anext(reader)

    cluster.run(story)


def test_following_reader_ends_when_it_is_closed_while_it_waits_for_a_broker():
    cluster = VirtualCluster(brokers=1)

    async def story() -> None:
        await cluster.create_subject("orders", partitions=2)
        async with Reader(cluster.address, "orders", follow=True) as reader:
            cluster.brokers[0].crash()
            following = asyncio.create_task(anext(reader))
            await asyncio.sleep(60)
        with pytest.raises(ClosedError):
            async with asyncio.timeout(5):
                await following

    cluster.run(story)


@pytest.mark.parametrize("error", [ForeignServerError(address="b:1"), OffsetOutOfRangeError()])
def test_following_reader_gives_up_when_waiting_does_not_help(error):
    """Another program listens at the address, or the broker stands on an older copy of its folder."""
    patience = Patience("orders", follows=True)
    patience.begin(error, 5_000)
    patience.check(error, 5_000 + READ_GIVE_UP_MS - 1)
    with pytest.raises(type(error)):
        patience.check(error, 5_000 + READ_GIVE_UP_MS)
