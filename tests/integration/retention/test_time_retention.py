"""Retention by time overtakes a consumer: it continues at the first message left and reports the
loss.
"""

from __future__ import annotations

import asyncio
from urllib.request import urlopen

import pytest

from keylane import Admin, Consumer, Message, Producer
from keylane.cli.commands.group_description import describe_group
from keylane.cli.options import OutputFormat
from keylane.consumer import ConsumerSettings
from keylane.protocol import endpoints
from keylane.protocol.control import Join, Retention
from keylane.protocol.errors import GroupUnknownError, OverloadedError
from keylane.protocol.frames import Acquire
from keylane.protocol.limits import GROUPS_PER_SUBJECT_MAX
from keylane.protocol.routing import Partition
from keylane.rpc.client import BrokerClient, MetaClient
from keylane.rpc.http_network import HttpNetwork
from support.cluster import Cluster, eventually

SEGMENT = 16_384
COUNT = 100
KEEP_LITTLE = f"segment_bytes = {SEGMENT}\nretention_bytes = {2 * SEGMENT}\n"
"""A broker looks for segments to remove when it starts."""
pytestmark = pytest.mark.cluster(brokers=1, broker_settings=KEEP_LITTLE)


async def removed(partition: Partition) -> None:
    """Wait until more is gone than the first message."""
    network = HttpNetwork()
    broker = BrokerClient(network, partition.address)
    try:
        async with asyncio.timeout(60):
            while (
                await broker.control(endpoints.PARTITION, id=partition.partition_id)
            ).first_offset < 2:
                await asyncio.sleep(0.05)
    finally:
        await broker.close()
        await network.close()


@pytest.mark.parametrize("strategy", ["exclusive", "shared"])
async def test_slow_consumer_continues_at_the_first_message_left(
    cluster: Cluster, strategy: str, caplog, capsys
):
    """It keeps its partition, handles the rest in order, and counts the messages removed before it
    pulled them.
    """
    route = await cluster.create("aged", partitions=1, retention=Retention.TIME)
    seen: list[Message] = []
    gate = asyncio.Event()

    async def handle(message: Message) -> None:
        seen.append(message)
        await gate.wait()

    settings = ConsumerSettings(
        consume_strategy=strategy,
        buffer_messages=1,
        in_flight_messages=1,
        pull_bytes=1,
        concurrency=1,
    )
    async with (
        Producer(cluster.meta) as producer,
        Consumer(
            cluster.meta, subject="aged", group="g", handler=handle, settings=settings
        ) as consumer,
    ):
        for _ in range(COUNT):
            await producer.send("aged", bytes(1_000), key=b"k")
        await eventually(lambda: seen)
        (broker,) = cluster.brokers
        broker.kill()
        broker.restart()
        await removed(route.partitions[0])
        await producer.send("aged", b"last", key=b"k")
        gate.set()
        await eventually(lambda: seen[-1].value == b"last", seconds=60)
        (held,) = consumer.assignment
        async with Admin(cluster.meta) as admin:
            (counted,) = (await admin.describe_group("aged", "g")).partitions
        await describe_group(cluster.meta, OutputFormat.TABLE, subject="aged", group="g")
    first, *rest = (message.offset for message in seen)
    assert first == 0
    assert rest == list(range(rest[0], COUNT + 1))
    assert rest[0] > 1
    assert counted.removed_unread is not None
    assert rest[0] - 1 <= counted.removed_unread < COUNT
    said = f"retention has removed {counted.removed_unread} messages that the group had not read"
    assert said in capsys.readouterr().out
    if strategy == "exclusive":
        assert held.missed == rest[0] - 1
        assert f"{held.missed} messages were removed before the group got them" in caplog.text


async def test_every_group_is_counted_when_messages_are_removed_before_it_pulled(cluster: Cluster):
    """Wherever it begins: the number is in its description, in the broker's metric and log."""
    route = await cluster.create("unread", partitions=1, retention=Retention.TIME)
    async with Admin(cluster.meta) as admin, Producer(cluster.meta) as producer:
        await producer.send("unread", b"before", key=b"k")
        await admin.create_group("unread", "early", start="earliest")
        await admin.create_group("unread", "late", start="latest")
        await admin.create_group("unread", "timed", start="time", at_ms=1)
        network = HttpNetwork()
        meta = MetaClient(network, [cluster.meta])
        await meta.call(endpoints.JOIN, Join(subject="unread", group="joined", session="a" * 16))
        await network.close()
        for _ in range(COUNT):
            await producer.send("unread", bytes(1_000), key=b"k")
        (broker,) = cluster.brokers
        broker.kill()
        broker.restart()
        await removed(route.partitions[0])
        (partition,) = (await admin.describe_subject("unread")).partitions
        first = partition.first_offset
        counted = {
            group: (await admin.describe_group("unread", group)).partitions[0].removed_unread
            for group in ("early", "late", "timed", "joined")
        }
        assert counted == {"early": first, "late": first - 1, "timed": first, "joined": first}
        with urlopen(f"http://{route.partitions[0].address}/metrics") as answer:
            metrics = answer.read().decode()
    for group, messages in counted.items():
        name = "keylane_group_removed_unread_messages"
        assert f'{name}{{group="{group}",subject="unread"}} {float(messages or 0)}' in metrics


async def test_group_that_a_client_made_at_a_broker_is_deleted_by_an_operator(cluster: Cluster):
    """No metaserver knows it: of a subject whose messages go by age, brokers are not told
    groups.
    """
    route = await cluster.create("haunted", partitions=1, retention=Retention.TIME)
    (partition,) = route.partitions
    number = partition.partition_id
    network = HttpNetwork()
    broker = BrokerClient(network, partition.address)
    try:
        for made in range(GROUPS_PER_SUBJECT_MAX):
            await broker.call(Acquire(number, f"ghost{made}", "a" * 16, 1_000, 1_000))
        with pytest.raises(OverloadedError) as refused:
            await broker.call(Acquire(number, "late", "a" * 16, 1, 1_000))
        assert refused.value.limit == GROUPS_PER_SUBJECT_MAX
        assert "keylane group create SUBJECT GROUP" in refused.value.hint
        async with Admin(cluster.meta) as admin:
            with pytest.raises(GroupUnknownError):
                await admin.delete_group("haunted", "ghost7")
            await admin.create_group("haunted", "ghost7")
            await admin.delete_group("haunted", "ghost7")
        async with asyncio.timeout(30):
            while "ghost7" in [
                each.group for each in (await broker.control(endpoints.PARTITION, id=number)).groups
            ]:
                await asyncio.sleep(0.05)
        await broker.call(Acquire(number, "late", "a" * 16, 1, 1_000))
    finally:
        await broker.close()
        await network.close()
