"""Groups whose consumers died before they began a partition find all of it, despite retention."""

from __future__ import annotations

import asyncio

import pytest

from keylane import Admin, Consumer, Message, Producer
from keylane.broker.retention.loop import NOT_ACCEPTED
from keylane.consumer import ConsumerSettings
from keylane.protocol import endpoints
from keylane.protocol.control import Heartbeat, Join
from keylane.protocol.operations import OperationKind, Reshape
from keylane.rpc.client import BrokerClient, MetaClient
from keylane.rpc.http_network import HttpNetwork
from support.cluster import Cluster, eventually

SEGMENT = 16_384
COUNT = 300
SETTINGS = ConsumerSettings(ttl_ms=1_500)
KEEP_LITTLE = f"segment_bytes = {SEGMENT}\nretention_bytes = {2 * SEGMENT}\n"
"""A broker looks for segments to remove when it starts."""
SETTINGS_OF_META = "expire_ms = 600000\nbroker_heartbeat_ms = 200\nbroker_ttl_ms = 1500\n"
"""Nothing that the metaserver does every `expire_ms` is done."""
pytestmark = pytest.mark.cluster(meta_settings=SETTINGS_OF_META, broker_settings=KEEP_LITTLE)


async def send(cluster: Cluster, start: int) -> list[bytes]:
    values = [b"%01000d" % number for number in range(start, start + COUNT)]
    async with Producer(cluster.meta) as producer:
        for value in values:
            await producer.send("orders", value, key=value[-2:])
    return values


async def handled(cluster: Cluster, group: str, wanted: list[bytes]) -> None:
    """A consumer of the group gets exactly these, in whatever order."""
    seen: list[Message] = []
    async with Consumer(
        cluster.meta, subject="orders", group=group, handler=seen.append, settings=SETTINGS
    ):
        await eventually(lambda: len(seen) >= len(wanted), what=f"all for {group}")
        await asyncio.sleep(0.2)
    assert sorted({message.value for message in seen}) == sorted(wanted)


async def dies_when_granted(meta: MetaClient, group: str) -> None:
    """A consumer is granted what there is, and is never heard of again, by no broker ever."""
    session = group.encode().hex().rjust(16, "0")
    await meta.call(
        endpoints.JOIN, Join(subject="orders", group=group, session=session, ttl_ms=5_000)
    )
    async with asyncio.timeout(60):
        while not (await meta.call(endpoints.HEARTBEAT, Heartbeat(session=session))).grants:
            await asyncio.sleep(0.05)


async def cleaned(cluster: Cluster) -> None:
    """Every broker has run its retention once, at its start."""
    network = HttpNetwork()
    for program in cluster.brokers:
        program.kill()
        program.restart()
        broker = BrokerClient(network, program.address)
        async with asyncio.timeout(60):
            while True:
                seen = (await broker.health()).details
                if seen["first_position"] or seen["retention"] not in {
                    "ok",
                    NOT_ACCEPTED,
                }:
                    break
                await asyncio.sleep(0.05)
    await network.close()


async def test_group_that_died_after_its_grant_finds_every_message(cluster: Cluster):
    """Messages that the others have handled stay for it, though none of its consumers ever called a
    broker.
    """
    await cluster.create("orders", partitions=2)
    network = HttpNetwork()
    meta = MetaClient(network, [cluster.meta])
    await dies_when_granted(meta, "dead")
    sent = await send(cluster, 0)
    await handled(cluster, "alive", sent)
    await cleaned(cluster)
    await handled(cluster, "dead", sent)
    await network.close()


async def test_group_created_at_the_latest_finds_every_message_since(cluster: Cluster):
    """It has no consumer until the others have handled everything, and a broker has looked for what
    it may remove.
    """
    await cluster.create("orders", partitions=2)
    before = await send(cluster, 0)
    async with Admin(cluster.meta) as admin:
        await admin.create_group("orders", "late", start="latest")
    since = await send(cluster, COUNT)
    await handled(cluster, "alive", before + since)
    await cleaned(cluster)
    await handled(cluster, "late", since)


async def test_lagging_group_finds_all_of_a_moved_partition(cluster: Cluster):
    """It is behind in the parent and has not begun the child; the metaserver dies right after the
    move.
    """
    await cluster.create("orders", partitions=1)
    network = HttpNetwork()
    meta = MetaClient(network, [cluster.meta])
    await dies_when_granted(meta, "dead")
    first = await send(cluster, 0)
    await handled(cluster, "alive", first)
    (partition,) = (await meta.route("orders")).open_partitions()
    to = "g2" if partition.broker_group == "g1" else "g1"
    ask = Reshape(kind=OperationKind.MOVE, partition_ids=(partition.partition_id,), broker_group=to)
    await cluster.reshape(ask)
    cluster.meta_program.kill()
    cluster.meta_program.restart()
    second = await send(cluster, COUNT)
    await handled(cluster, "alive", second)
    await cleaned(cluster)
    await handled(cluster, "dead", first + second)
    checks = (await meta.call(endpoints.VERIFY)).checks
    assert not [check.violations for check in checks if check.violations]
    await network.close()
