"""`keylane meta rebuild` while a group has a backlog before an empty child: no message overtakes
the backlog.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from keylane import Consumer, Message, Producer
from keylane.consumer import ConsumerSettings
from keylane.protocol import endpoints
from keylane.protocol.operations import OperationKind, Reshape
from keylane.protocol.routing import Partition
from keylane.rpc.client import BrokerClient, MetaClient
from keylane.rpc.http_network import HttpNetwork
from support.cluster import Cluster, eventually
from support.lost_database import rebuild_lost_database

SLOW = ConsumerSettings(ttl_ms=1_500, concurrency=1, buffer_messages=1, pull_bytes=1)
BACKLOG, LATER = 100, 10

pytestmark = pytest.mark.cluster(meta_settings="expire_ms = 200\n")


async def moved(cluster: Cluster, network: HttpNetwork, partition: Partition) -> Partition:
    """Move a partition to the other broker; returns the child, once its broker knows the group."""
    at = {"g1": 0, "g2": 1}
    target = "g2" if partition.broker_group == "g1" else "g1"
    ask = Reshape(
        kind=OperationKind.MOVE, partition_ids=(partition.partition_id,), broker_group=target
    )
    (done,) = await cluster.reshape(ask)
    (child,) = done.children
    broker = BrokerClient(network, cluster.brokers[at[target]].address)
    for _ in range(600):
        if (await broker.control(endpoints.PARTITION, id=child.partition_id)).groups:
            return child
        await asyncio.sleep(0.05)
    raise AssertionError(child)


async def test_backlog_behind_an_empty_partition_is_handled_first(
    cluster: Cluster, tmp_path: Path
) -> None:
    """One key, moved twice without a message in between: handled in order after the database was
    lost.
    """
    route = await cluster.create("s", partitions=1, strategy="strict")
    network = HttpNetwork()
    handled: list[Message] = []
    gate = asyncio.Event()

    async def some(message: Message) -> None:
        if len(handled) >= 5:
            await gate.wait()
        handled.append(message)

    async with Producer(cluster.meta) as producer:
        for number in range(BACKLOG):
            await producer.send("s", b"%d" % number, key=b"k")
        async with Consumer(cluster.meta, subject="s", group="g", handler=some, settings=SLOW):
            await eventually(lambda: len(handled) == 5)
        child = await moved(cluster, network, route.partitions[0])
        await moved(cluster, network, child)
        for number in range(BACKLOG, BACKLOG + LATER):
            await producer.send("s", b"%d" % number, key=b"k")

    await rebuild_lost_database(cluster, tmp_path)

    again: list[int] = []

    async def slow(message: Message) -> None:
        again.append(int(message.value))
        await asyncio.sleep(0.01)

    first = Consumer(cluster.meta, subject="s", group="g", handler=slow, settings=SLOW)
    other = Consumer(cluster.meta, subject="s", group="g", handler=slow, settings=SLOW)
    async with first, other:
        await eventually(lambda: BACKLOG + LATER - 1 in again and BACKLOG - 1 in again, seconds=60)
    seen = list(dict.fromkeys(again))
    assert seen == list(range(seen[0], BACKLOG + LATER))
    assert seen[0] <= 5
    meta = MetaClient(network, [cluster.meta])
    assert [check for check in (await meta.call(endpoints.VERIFY)).checks if check.violations] == []
    await network.close()
