"""A group's progress is set although a silent broker has abandoned partitions."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from keylane import Consumer, Message, Producer
from keylane.consumer import ConsumerSettings
from keylane.protocol import endpoints
from keylane.protocol.errors import NotSentError
from keylane.protocol.operations import OperationKind, Reshape
from keylane.protocol.progress import GroupReset, ResetGroup, ResetTo
from keylane.rpc.client import MetaClient
from keylane.rpc.http_network import HttpNetwork
from support.cluster import alert_cluster, eventually, silent

SETTINGS = ConsumerSettings(ttl_ms=1_000)


async def test_reset_leaves_out_abandoned_partitions_on_a_silent_broker(tmp_path: Path) -> None:
    """They stay as they were, and are listed; all others are set."""
    with alert_cluster(tmp_path) as cluster:
        await cluster.create("s", partitions=4, strategy="best_tried")
        network = HttpNetwork()
        try:
            meta = MetaClient(network, [cluster.meta])
            route = await meta.route("s")
            there = {
                partition.partition_id
                for partition in route.partitions
                if partition.broker_group == "g2"
            }
            handled: list[Message] = []
            async with Producer(cluster.meta) as producer:
                for number in range(100):
                    await producer.send("s", b"%d" % number, key=b"k%d" % number)
            async with Consumer(
                cluster.meta, subject="s", group="g", handler=handled.append, settings=SETTINGS
            ):
                await eventually(lambda: len(handled) == 100)
            kept = {message.value for message in handled if message.partition_id not in there}
            assert 0 < len(kept) < 100

            cluster.brokers[1].kill()
            await silent(meta, "g2")
            with pytest.raises(NotSentError):
                await meta.call(
                    endpoints.RESET_GROUP, ResetGroup(to=ResetTo.EARLIEST), subject="s", group="g"
                )
            ask = Reshape(kind=OperationKind.EVACUATE, broker_group="g2", without_source=True)
            await meta.call(endpoints.RESHAPE, ask)

            async def opened() -> bool:
                return all(
                    partition.broker_group == "g1"
                    for partition in (await meta.route("s")).open_partitions()
                )

            while not await opened():
                await asyncio.sleep(0.05)
            named = ResetGroup(to=ResetTo.EARLIEST, partition_id=min(there))
            with pytest.raises(NotSentError):
                await meta.call(endpoints.RESET_GROUP, named, subject="s", group="g")
            done = await meta.call(
                endpoints.RESET_GROUP, ResetGroup(to=ResetTo.EARLIEST), subject="s", group="g"
            )
            assert set(done.left_out) == there
            assert {cursor.partition_id for cursor in done.cursors}.isdisjoint(there)
            again: list[Message] = []
            async with Consumer(
                cluster.meta, subject="s", group="g", handler=again.append, settings=SETTINGS
            ):
                await eventually(lambda: {message.value for message in again} == kept)
            cluster.brokers[1].restart()  # and what it has is drained there
            done = await reset_once(meta)
            assert {cursor.partition_id for cursor in done.cursors} >= there
        finally:
            await network.close()


async def reset_once(meta: MetaClient) -> GroupReset:
    """The whole subject, as soon as every broker has reported itself."""
    async with asyncio.timeout(60):
        while True:
            try:
                done = await meta.call(
                    endpoints.RESET_GROUP, ResetGroup(to=ResetTo.LATEST), subject="s", group="g"
                )
                if not done.left_out:
                    return done
            except NotSentError:
                pass
            await asyncio.sleep(0.05)
