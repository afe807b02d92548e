"""A consumer that an error has ended keeps no partition: others continue at once."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import pytest

from keylane import Consumer, Message, Producer
from keylane.consumer import ConsumerSettings
from keylane.protocol import endpoints
from keylane.protocol.control import AcceptFolder
from keylane.protocol.errors import KeylaneError
from keylane.rpc.client import MetaClient
from keylane.rpc.http_network import HttpNetwork
from support.cluster import ALERT, Cluster, eventually
from support.handling import Crash


async def accept(meta: str, broker_group: str) -> None:
    """Accept a folder that is behind, as soon as the metaserver takes its broker group for
    silent.
    """
    network = HttpNetwork()
    try:
        async with asyncio.timeout(60):
            while True:
                try:
                    await MetaClient(network, [meta]).call(
                        endpoints.ACCEPT_FOLDER, AcceptFolder(), group=broker_group
                    )
                    return
                except KeylaneError:
                    await asyncio.sleep(0.1)
    finally:
        await network.close()


async def test_crashed_consumer_releases_its_partitions(shared_cluster: Cluster):
    """Its program ignores the error; another consumer has its partitions long before the lease
    would end.
    """
    await shared_cluster.create("crashed", partitions=2)
    async with Producer(shared_cluster.meta) as producer:
        for number in range(20):
            await producer.send("crashed", b"%d" % number, key=b"k%d" % number)
    seen: list[Message] = []

    async def crash(message: Message) -> None:
        raise Crash

    patient = ConsumerSettings(ttl_ms=600_000)
    async with Consumer(
        shared_cluster.meta, subject="crashed", group="g", handler=crash, settings=patient
    ) as first:
        with pytest.raises(Crash):
            await first.wait()
        async with Consumer(
            shared_cluster.meta, subject="crashed", group="g", handler=seen.append
        ) as second:
            await eventually(lambda: len(seen) == 20, seconds=60)
            assert len(second.assignment) == 2
        assert first.assignment == []
        await asyncio.gather(first.close(), first.close())


@pytest.mark.cluster(meta_settings=ALERT)
@pytest.mark.parametrize("count", [1, 200], ids=["fewer", "more"])
async def test_partition_is_pulled_anew_when_its_broker_lost_messages(
    cluster: Cluster, tmp_path: Path, count: int
):
    """An operator accepts an older copy of the broker's folder: the next token begins at the
    broker's cursor, also if the partition has grown beyond the offsets that were pulled before.
    """
    route = await cluster.create("older", partitions=1)
    program = cluster.brokers[int(route.partitions[0].broker_group[1:]) - 1]
    folder = tmp_path / f"broker-{route.partitions[0].broker_group[1:]}"
    seen: list[Message] = []
    new = [b"new %d" % number for number in range(count)]

    async def send(values: list[bytes]) -> None:
        async with Producer(cluster.meta) as producer:
            for value in values:
                await producer.send("older", value, key=b"k")

    async with Consumer(cluster.meta, subject="older", group="g", handler=seen.append):
        await send([b"kept"])
        await eventually(lambda: len(seen) == 1)
        await asyncio.sleep(0.2)
        program.kill()
        shutil.copytree(folder, tmp_path / "copy")
        program.restart()
        await send([b"lost"] * 20)
        await eventually(lambda: len(seen) == 21, seconds=60)
        program.kill()
        shutil.rmtree(folder)
        shutil.move(tmp_path / "copy", folder)
        program.restart()
        await accept(cluster.meta, route.partitions[0].broker_group)
        await send(new)
        await eventually(lambda: seen[-1].value == new[-1], seconds=60)
    assert seen[-1].fencing_token > seen[0].fencing_token
    assert [message.value for message in seen[21:]] == new
    assert [message.offset for message in seen[21:]] == list(range(1, 1 + len(new)))
