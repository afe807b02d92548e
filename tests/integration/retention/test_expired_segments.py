"""Segments of a queue whose messages retention has removed, on real processes."""

from __future__ import annotations

import asyncio
import json
import time

import pytest

from keylane import Consumer, Message, Producer, QueueReader
from keylane.consumer import ConsumerSettings
from keylane.protocol import endpoints
from keylane.protocol.errors import OffsetOutOfRangeError
from keylane.protocol.operations import OperationKind, Reshape
from keylane.protocol.routing import PartitionState
from keylane.rpc.client import BrokerClient, MetaClient
from keylane.rpc.http_network import HttpNetwork
from support.cluster import Cluster, eventually

SEGMENT = 16_384
SETTINGS = ConsumerSettings(ttl_ms=1_500)
KEEP_LITTLE = f"segment_bytes = {SEGMENT}\nretention_bytes = {2 * SEGMENT}\n"
"""A broker looks for segments to remove when it starts."""
SETTINGS_OF_META = "expire_ms = 200\nbroker_heartbeat_ms = 200\nbroker_ttl_ms = 1500\n"
"""The metaserver looks often."""
pytestmark = pytest.mark.cluster(meta_settings=SETTINGS_OF_META, broker_settings=KEEP_LITTLE)


async def send(cluster: Cluster, subject: str, count: int, *, size: int = 8) -> None:
    async with Producer(cluster.meta) as producer:
        for number in range(count):
            await producer.send(subject, b"%0*d" % (size, number), key=b"%d" % number)


async def move(cluster: Cluster, reader: QueueReader) -> None:
    at = (await reader.queues())[0].segments[-1].partition
    to = "g2" if at.broker_group == "g1" else "g1"
    ask = Reshape(kind=OperationKind.MOVE, partition_ids=(at.partition_id,), broker_group=to)
    await cluster.reshape(ask)


async def segments(reader: QueueReader) -> list[int]:
    """Logic starts."""
    return [segment.partition.logic_start for segment in (await reader.queues())[0].segments]


async def all_expired(reader: QueueReader, starts: list[int]) -> None:
    until = time.monotonic() + 60
    while await segments(reader) != starts:
        assert time.monotonic() < until, await segments(reader)
        await asyncio.sleep(0.1)


async def test_queue_continues_behind_expired_head_segments(cluster: Cluster):
    """Its min rises, offsets below are refused by name, a stopped group and a new one continue in
    order.
    """
    await cluster.create("aged", partitions=1, static=True)
    await cluster.create("filler", partitions=2)
    network = HttpNetwork()
    meta = MetaClient(network, [cluster.meta])
    seen: list[Message] = []
    async with QueueReader(cluster.meta, subject="aged") as reader:
        await send(cluster, "aged", 5)
        async with Consumer(
            cluster.meta, subject="aged", group="g", handler=seen.append, settings=SETTINGS
        ):
            await eventually(lambda: len(seen) == 5)
            await asyncio.sleep(0.1)
        await move(cluster, reader)
        await move(cluster, reader)  # the second one stays empty
        await send(cluster, "filler", 150, size=1_000)
        for broker in cluster.brokers:  # they look at once when they start
            broker.kill()
            broker.restart()
        await send(cluster, "aged", 3)
        await all_expired(reader, [5])
        assert await reader.bounds(0) == (5, 8)
        with pytest.raises(OffsetOutOfRangeError) as refused:
            await reader.read(0, 4)
        assert refused.value.first_offset == 5
        slice_ = await reader.read(0, 5)
        assert [message.logic_offset for message in slice_.messages] == list(
            range(5, 5 + len(slice_.messages))
        )
        history = (await meta.call(endpoints.HISTORY, subject="aged")).partitions
        assert [entry.partition.state for entry in history] == [
            PartitionState.EXPIRED,
            PartitionState.EXPIRED,
            PartitionState.OPEN,
        ]
        assert [entry.end_offset for entry in history] == [5, 0, None]
        for group in ("g", "new"):
            late: list[Message] = []
            async with Consumer(
                cluster.meta, subject="aged", group=group, handler=late.append, settings=SETTINGS
            ):
                await eventually(lambda late=late: len(late) == 3)
            assert [message.logic_offset for message in late] == [5, 6, 7]
        checks = (await meta.call(endpoints.VERIFY)).checks
        assert not [json.dumps(check.violations) for check in checks if check.violations]
    await network.close()


async def test_segments_that_a_group_has_not_read_are_kept(cluster: Cluster):
    """A group that stopped in the first segment misses no message of later segments that aged
    meanwhile.
    """
    await cluster.create("kept", partitions=1, static=True)
    await cluster.create("filler", partitions=2)
    seen: list[Message] = []
    async with QueueReader(cluster.meta, subject="kept") as reader:
        await send(cluster, "kept", 5)
        async with Consumer(cluster.meta, subject="kept", group="g", settings=SETTINGS) as consumer:
            await (await anext(consumer)).ack()
        await move(cluster, reader)
        await send(cluster, "kept", 5)
        await move(cluster, reader)
        network = HttpNetwork()
        later = (await reader.queues())[0].segments[1].partition
        broker = BrokerClient(network, later.address)
        until = time.monotonic() + 60
        while not (await broker.control(endpoints.PARTITION, id=later.partition_id)).groups:
            assert time.monotonic() < until, "its broker has not heard of the group"
            await asyncio.sleep(0.05)
        await network.close()
        await send(cluster, "filler", 150, size=1_000)
        for program in cluster.brokers:
            program.kill()
            program.restart()
        await asyncio.sleep(1)
        async with Consumer(
            cluster.meta, subject="kept", group="g", handler=seen.append, settings=SETTINGS
        ):
            await eventually(lambda: len(seen) == 9)
        assert [message.logic_offset for message in seen] == list(range(1, 10))
