"""`keylane meta rebuild` after a reset of a shared group: the group is still shared."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from keylane import Consumer, Message, Producer
from keylane.consumer import ConsumerSettings
from keylane.protocol import endpoints
from keylane.protocol.progress import ResetGroup, ResetTo
from keylane.protocol.routing import ConsumeStrategy
from keylane.rpc.client import MetaClient
from keylane.rpc.http_network import HttpNetwork
from support.cluster import Cluster, eventually
from support.lost_database import rebuild_lost_database

SETTINGS = ConsumerSettings(ttl_ms=1_500)


async def test_shared_group_continues_from_its_cursor_after_a_rebuild(tmp_path: Path) -> None:
    """
    Every partition was reset and none acquired since, then the database lost: shared consumers get
    all messages again.
    """
    cluster = Cluster(tmp_path, 2)
    network = HttpNetwork()
    try:
        await cluster.create("s", partitions=2)
        meta = MetaClient(network, [cluster.meta])
        handled: list[Message] = []

        def consumer() -> Consumer:
            return Consumer(
                cluster.meta,
                subject="s",
                group="g",
                handler=handled.append,
                settings=replace(SETTINGS, consume_strategy="shared"),
            )

        async with Producer(cluster.meta) as producer, consumer():
            for number in range(20):
                await producer.send("s", b"%d" % number, key=b"%d" % number)
            await eventually(lambda: len(handled) == 20, seconds=60)
        await meta.call(
            endpoints.RESET_GROUP, ResetGroup(to=ResetTo.EARLIEST), subject="s", group="g"
        )

        await rebuild_lost_database(cluster, tmp_path)

        handled.clear()
        async with consumer():
            await eventually(lambda: len({message.value for message in handled}) == 20, seconds=60)
        assert (
            await meta.call(endpoints.GROUP, subject="s", group="g")
        ).strategy is ConsumeStrategy.SHARED
    finally:
        await network.close()
        cluster.stop()
