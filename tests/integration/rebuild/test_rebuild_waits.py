"""After `keylane meta rebuild` no partition is granted that an old consumer may still handle."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

from keylane import Consumer, Message, Producer
from keylane.consumer import ConsumerSettings
from keylane.protocol import endpoints
from keylane.protocol.control import Heartbeat, Join
from keylane.protocol.errors import NotSentError, Reason
from keylane.protocol.frames import Acquire
from keylane.protocol.progress import ResetGroup, ResetTo
from keylane.rpc.client import BrokerClient, MetaClient
from keylane.rpc.http_network import HttpNetwork
from support.cluster import Cluster, eventually
from support.lost_database import rebuild_lost_database
from support.raising import raises

TTL_MS = 6_000
OLD = "0" * 31 + "1"


async def test_rebuilt_group_is_granted_nothing_before_an_old_session_has_ended(
    cluster: Cluster, tmp_path: Path
) -> None:
    """
    An old consumer holds its partition for its ttl; a consumer that joins at once waits that long,
    then continues.
    """
    await cluster.create("s", partitions=1)
    async with Producer(cluster.meta) as producer:
        await producer.send("s", b"value", key=b"key")
    network = HttpNetwork()
    try:
        meta = MetaClient(network, [cluster.meta])
        await meta.call(endpoints.JOIN, Join(subject="s", group="g", session=OLD, ttl_ms=TTL_MS))
        (grant,) = (
            await meta.call(endpoints.HEARTBEAT, Heartbeat(session=OLD), timeout_ms=60_000)
        ).grants
        broker = BrokerClient(network, grant.partition.address)
        ask = Acquire(grant.partition.partition_id, "g", OLD, grant.token, TTL_MS)
        await broker.call(ask)
        held_at = time.monotonic()
        await rebuild_lost_database(cluster, tmp_path)

        handled: list[Message] = []
        settings = ConsumerSettings(ttl_ms=2_000)
        async with Consumer(
            cluster.meta, subject="s", group="g", handler=handled.append, settings=settings
        ):
            await eventually(lambda: handled, seconds=60)
        waited_ms = 1_000 * (time.monotonic() - held_at)
        assert [message.value for message in handled] == [b"value"]
        assert waited_ms >= TTL_MS
        assert waited_ms < 4 * TTL_MS
    finally:
        await network.close()


async def test_rebuilt_group_is_not_reset_while_an_old_session_may_be_at_work(
    cluster: Cluster, tmp_path: Path
) -> None:
    """An operator is told to wait as well."""
    await cluster.create("s", partitions=1)
    handled: list[Message] = []
    async with (
        Producer(cluster.meta) as producer,
        Consumer(cluster.meta, subject="s", group="g", handler=handled.append),
    ):
        await producer.send("s", b"value", key=b"key")
        await eventually(lambda: handled)
    await rebuild_lost_database(cluster, tmp_path)
    network = HttpNetwork()
    try:
        meta = MetaClient(network, [cluster.meta])
        with raises(Reason.GROUP_BUSY, match="the database was rebuilt"):
            await reset(meta)
    finally:
        await network.close()


async def reset(meta: MetaClient) -> None:
    """Wait until the brokers have reported themselves."""
    async with asyncio.timeout(60):
        while True:
            try:
                await meta.call(
                    endpoints.RESET_GROUP, ResetGroup(to=ResetTo.EARLIEST), subject="s", group="g"
                )
            except NotSentError:
                await asyncio.sleep(0.1)
