"""A broker with only sealed partitions of a subject dies before a group has read them: real
processes.
"""

from __future__ import annotations

import asyncio

import pytest

from keylane import Consumer, Producer
from keylane.consumer import ConsumerSettings
from keylane.protocol import endpoints
from keylane.protocol.operations import OperationKind, OperationState, Reshape
from keylane.rpc.client import MetaClient
from keylane.rpc.http_network import HttpNetwork
from support.cluster import ALERT, Cluster, done_operation, eventually, silent

OLD = [b"%d" % number for number in range(20)]
NEW = [b"%d" % number for number in range(20, 40)]

pytestmark = pytest.mark.cluster(meta_settings=ALERT)


async def send(cluster: Cluster, values: list[bytes]) -> None:
    async with Producer(cluster.meta) as producer:
        for value in values:
            await producer.send("tried", value, key=b"k")


def consumer(cluster: Cluster, group: str, seen: list[bytes]) -> Consumer:
    return Consumer(
        cluster.meta,
        subject="tried",
        group=group,
        handler=lambda message: seen.append(message.value),
        settings=ConsumerSettings(ttl_ms=1_500),
    )


@pytest.mark.crash
async def test_partition_sealed_on_a_dead_broker_blocks_no_child_and_is_read_on_its_return(
    cluster: Cluster,
):
    """A group reads on without the broker, and reads the rest when it is back; a later group reads
    that first.
    """
    (parent,) = (await cluster.create("tried", partitions=1, strategy="best_tried")).partitions
    home = int(parent.broker_group.removeprefix("g")) - 1
    other = "g2" if home == 0 else "g1"
    await send(cluster, OLD)
    ask = Reshape(kind=OperationKind.MOVE, partition_ids=(parent.partition_id,), broker_group=other)
    await cluster.reshape(ask)
    await send(cluster, NEW)
    network = HttpNetwork()
    meta = MetaClient(network, [cluster.meta])
    cluster.brokers[home].kill()
    await silent(meta, parent.broker_group)
    seen: list[bytes] = []
    late: list[bytes] = []
    async with consumer(cluster, "early", seen):
        ask = Reshape(
            kind=OperationKind.EVACUATE, broker_group=parent.broker_group, without_source=True
        )
        (view,) = (await meta.call(endpoints.RESHAPE, ask)).operations
        while view.state is not OperationState.FENCE:
            await asyncio.sleep(0.05)
            (view, _) = (await meta.call(endpoints.OPERATIONS, subject="tried")).operations
        assert view.reordered == (parent.partition_id,)
        await eventually(lambda: seen == NEW, what="what continues it")
        cluster.brokers[home].restart()
        await done_operation(meta, view)
        await eventually(lambda: seen == NEW + OLD, what="what was left")
    async with consumer(cluster, "late", late):
        await eventually(lambda: late == OLD + NEW, what="all, in order")
    assert [check for check in (await meta.call(endpoints.VERIFY)).checks if check.violations] == []
    await network.close()
