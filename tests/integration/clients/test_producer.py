"""A producer against real brokers."""

import asyncio
from dataclasses import replace

import pytest

from keylane import Producer
from keylane.producer import ProducerSettings
from keylane.protocol.backoff import Backoff
from keylane.protocol.errors import (
    ClosedError,
    GivenUpError,
    InvalidRequestError,
    KeylaneError,
    MessageTooLargeError,
    NotSentError,
    QueueFullError,
    Reason,
    SubjectUnknownError,
)
from keylane.protocol.routing import logical_partition, route_table
from keylane.rpc.client import MetaClient
from keylane.rpc.http_network import HttpNetwork
from support.cluster import Cluster, assert_order_per_key
from support.raising import raises

QUICK = ProducerSettings(
    call_timeout_ms=2_000, backoff=Backoff(first_ms=10, max_ms=50), close_timeout_ms=500
)


async def test_receipts_say_where_each_message_is(shared_cluster: Cluster):
    """Each receipt names the partition and offset under which the log gives that message back."""
    route = await shared_cluster.create("receipts")
    sent: dict[bytes, list[bytes]] = {}
    async with Producer(shared_cluster.meta) as producer:
        futures = []
        for number in range(3_000):
            key, value = b"k%d" % (number % 37), b"v%d" % number
            sent.setdefault(key, []).append(value)
            futures.append((value, producer.send("receipts", value, key=key)))
        receipts = [(value, await future) for value, future in futures]
    log = await shared_cluster.log(route)

    assert_order_per_key([message for part in log.values() for message in part], sent)
    for value, receipt in receipts:
        assert log[receipt.partition_id][receipt.offset].value == value
        assert (receipt.durable, receipt.duplicate, receipt.reordered) == ("fsync", False, False)


async def test_messages_without_a_key_go_everywhere(shared_cluster: Cluster):
    """Without a key any partition will do, and all of them get some."""
    route = await shared_cluster.create("unkeyed")
    async with Producer(shared_cluster.meta) as producer:
        await producer.send_all("unkeyed", ((b"", b"%d" % number) for number in range(1_000)))
        assert producer.stats.acked == 1_000
    log = await shared_cluster.log(route)

    assert sorted(int(message.value) for part in log.values() for message in part) == list(
        range(1_000)
    )
    assert all(log.values())


async def test_properties_and_large_messages_arrive(shared_cluster: Cluster):
    """The largest message allowed is stored, between small ones, in order; properties come back."""
    route = await shared_cluster.create("large", partitions=1)
    large = bytes(1024 * 1024 - 1)
    async with Producer(shared_cluster.meta) as producer:
        for value in (b"first", large, b"last"):
            producer.send("large", value, key=b"k")
        with pytest.raises(MessageTooLargeError):
            producer.send("large", large + b"!", key=b"k")
        with pytest.raises(MessageTooLargeError):
            producer.send("large", b"", key=bytes(2_000))
        await producer.flush()
    (messages,) = (await shared_cluster.log(route)).values()

    assert [message.value for message in messages] == [b"first", large, b"last"]


@pytest.mark.parametrize("name", ["../x", "a\0b", "x" * 300, "", "ü"])
async def test_illegal_name_is_refused_at_once(shared_cluster: Cluster, name: str):
    """A name that is none never reaches the metaserver."""
    async with Producer(shared_cluster.meta) as producer:
        with raises(Reason.NAME_INVALID):
            producer.send(name, b"v")


async def test_unknown_subject_is_told_by_the_future(shared_cluster: Cluster):
    """The future of a message to no subject raises, and the producer sends other messages."""
    await shared_cluster.create("known")
    async with Producer(shared_cluster.meta) as producer:
        with pytest.raises(SubjectUnknownError, match="keylane subject create"):
            await producer.send("no-such-subject", b"v")
        assert (await producer.send("known", b"v")).offset >= 0
        await producer.flush()
        producer.send("no-such-subject", b"v")
        producer.send("no-such-subject", b"w")
        with pytest.raises(GivenUpError, match="2 messages were given up") as told:
            await producer.flush()
        assert isinstance(told.value.__cause__, SubjectUnknownError)


async def test_another_strategy_than_the_stored_is_refused(shared_cluster: Cluster):
    """A client that expects another order strategy than the subject has stores nothing."""
    route = await shared_cluster.create("strictly", strategy="strict")
    async with Producer(shared_cluster.meta, order_strategy="best_tried") as producer:
        with raises(Reason.ORDER_STRATEGY):
            await producer.send("strictly", b"v")
    assert not any((await shared_cluster.log(route)).values())


async def test_value_is_refused_when_it_is_not_bytes(shared_cluster: Cluster):
    """Text is not encoded behind the user's back."""
    async with Producer(shared_cluster.meta) as producer:
        with pytest.raises(InvalidRequestError):
            producer.send("known", "text")


async def test_send_raises_when_the_queue_is_full(shared_cluster: Cluster):
    """The queue has a limit; `drain` waits for room, and every message that was queued is
    stored.
    """
    route = await shared_cluster.create("narrow", partitions=1)
    settings = ProducerSettings(queue_bytes=1 << 20)
    value = bytes(100_000)
    refused = 0
    async with Producer(shared_cluster.meta, settings=settings) as producer:
        for _ in range(100):
            try:
                producer.send("narrow", value, key=b"k")
            except QueueFullError:
                refused += 1
                await producer.drain()
                producer.send("narrow", value, key=b"k")
        await producer.flush()
    (messages,) = (await shared_cluster.log(route)).values()

    assert refused
    assert len(messages) == 100


async def test_unreachable_metaserver_is_told_at_open():
    """Opening a producer where no metaserver listens says what to do."""
    with pytest.raises(NotSentError, match="Check that it is running"):
        async with Producer("127.0.0.1:1"):
            pass


async def test_closed_producer_takes_nothing(shared_cluster: Cluster):
    """Sending before open or after close is a mistake of the caller's."""
    producer = Producer(shared_cluster.meta)
    with pytest.raises(ClosedError) as caught:
        producer.send("known", b"v")
    assert caught.value.hint == "Use it inside its `async with` block.", "no word of acks"
    async with producer:
        pass
    with pytest.raises(ClosedError):
        producer.send("known", b"v")


@pytest.mark.crash
async def test_strict_rides_out_a_killed_broker(cluster: Cluster):
    """Through two kills in mid-stream every message is stored once and in order, without a word
    from the user.
    """
    route = await cluster.create("steady", strategy="strict")
    sent: dict[bytes, list[bytes]] = {}
    async with Producer(cluster.meta, settings=ProducerSettings(backoff=QUICK.backoff)) as producer:
        for number in range(30_000):
            key, value = b"k%d" % (number % 101), b"%d" % number
            sent.setdefault(key, []).append(value)
            future = producer.send("steady", value, key=key)
            if not number:
                await future
            if number % 100 == 0:
                await asyncio.sleep(0.001)
            if number in (8_000, 20_000):
                cluster.brokers[0].kill()
            if number in (12_000, 24_000):
                cluster.brokers[0].restart()
        await producer.flush()
        assert producer.stats.retries
    log = await cluster.log(route)

    assert_order_per_key([message for part in log.values() for message in part], sent)


@pytest.mark.crash
async def test_best_tried_declares_messages_reordered_when_they_go_elsewhere(cluster: Cluster):
    """While a broker is down its messages are stored elsewhere, each receipt declaring it; later
    they are home again.
    """
    route = await cluster.create("anywhere", strategy="best_tried")
    home = {partition.partition_id: partition.broker_group for partition in route.partitions}
    settings = replace(QUICK, leave_after_ms=300)
    async with Producer(cluster.meta, settings=settings) as producer:
        keys = [b"k%d" % number for number in range(40)]
        before = {key: await producer.send("anywhere", b"1", key=key) for key in keys}
        cluster.brokers[0].kill()
        futures = {key: producer.send("anywhere", b"2", key=key) for key in keys}
        during = {key: await future for key, future in futures.items()}
        cluster.brokers[0].restart()
        for _ in range(200):
            after = {key: await producer.send("anywhere", b"3", key=key) for key in keys}
            if not any(receipt.reordered for receipt in after.values()):
                break
            await asyncio.sleep(0.02)

    for key in keys:
        lost = home[before[key].partition_id] == "g1"
        assert during[key].reordered == lost
        assert home[during[key].partition_id] == "g2"
        assert after[key].partition_id == before[key].partition_id


@pytest.mark.crash
async def test_best_tried_reorders_nothing_when_a_broker_is_restarted(cluster: Cluster):
    """With the settings as they are, messages wait for a broker that comes back within seconds."""
    route = await cluster.create("restarted", strategy="best_tried")
    sent: dict[bytes, list[bytes]] = {}
    async with Producer(cluster.meta) as producer:
        futures = []
        for number in range(400):
            key, value = b"k%d" % (number % 20), b"%d" % number
            sent.setdefault(key, []).append(value)
            futures.append(producer.send("restarted", value, key=key))
            if number == 100:
                await futures[0]
                cluster.brokers[0].kill()
            elif number == 300:
                cluster.brokers[0].restart()
            await asyncio.sleep(0.002)
        receipts = [await future for future in futures]
        assert producer.stats.retries
    log = await cluster.log(route)

    assert not any(receipt.reordered for receipt in receipts)
    assert_order_per_key([message for part in log.values() for message in part], sent)


@pytest.mark.crash
async def test_best_tried_gives_up_after_its_time(cluster: Cluster):
    """With no broker left a message is out of the queue after its time and its tries, and its
    future says why.
    """
    await cluster.create("nowhere", strategy="best_tried")
    settings = replace(QUICK, leave_after_ms=50, give_up_after_ms=500)
    async with Producer(cluster.meta, settings=settings) as producer:
        await producer.send("nowhere", b"1", key=b"k")
        for broker in cluster.brokers:
            broker.kill()
        with pytest.raises(KeylaneError) as caught:
            await producer.send("nowhere", b"2", key=b"k")
        assert caught.value.code // 100 == 12
    for broker in cluster.brokers:
        broker.restart()


@pytest.mark.crash
async def test_producer_waits_and_says_so_when_it_started_beside_a_silent_broker(
    cluster: Cluster,
):
    """STRICT: keyed messages for the silent broker wait in sight, all others are acked; nothing
    waits once it is back.
    """
    route = await cluster.create("half", strategy="strict")
    home = {partition.partition_id: partition for partition in route.partitions}
    cluster.brokers[0].kill()
    network = HttpNetwork()
    meta = MetaClient(network, [cluster.meta])
    while all(partition.address for partition in (await meta.route("half")).partitions):
        await asyncio.sleep(0.1)
    await network.close()
    keys = [b"k%d" % number for number in range(40)]
    async with Producer(cluster.meta, settings=QUICK) as producer:
        futures = {key: producer.send("half", b"1", key=key) for key in keys}
        keyless = [producer.send("half", b"1") for _ in range(40)]
        groups = {home[(await future).partition_id].broker_group for future in keyless}
        assert groups == {"g2"}
        table = route_table(route)
        lost = {key for key in keys if table[logical_partition(key)].broker_group == "g1"}
        for key in set(keys) - lost:
            assert home[(await futures[key]).partition_id].broker_group == "g2"
        assert not any(futures[key].done() for key in lost)
        names = {partition.name for partition in route.partitions if partition.broker_group == "g1"}
        assert set(producer.stats.waiting) == names
        waiting = producer.waiting()
        assert {entry.key for entry in waiting.keys} == lost
        assert {entry.partition for entry in waiting.keys} == names
        assert waiting.messages == len(lost)
        for entry in waiting.keys:
            assert (entry.broker_group, entry.messages) == ("g1", 1)
            assert entry.size_bytes == len(entry.key) + len(b"1")
            assert entry.reason == producer.stats.waiting[entry.partition]
            assert "restart broker group g1" in entry.advice
        cluster.brokers[0].restart()
        for key in lost:
            assert home[(await futures[key]).partition_id].broker_group == "g1"
        assert producer.stats.waiting == {}
        assert producer.waiting().messages == 0
