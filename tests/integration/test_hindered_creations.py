"""Creations that a real broker hinders, and names as long as they may be: no metaserver ends of them."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from cluster import Cluster, eventually
from keylane import Consumer, Message, Producer
from keylane.protocol.control import CreateSubject
from keylane.protocol.errors import InvalidNameError, NotEnoughBrokersError
from keylane.protocol.ids import NAME_CHARS_MAX
from keylane.protocol.operations import OperationKind, Reshape
from keylane.rpc.client import MetaClient
from keylane.rpc.http_network import HttpNetwork

REPAIR_MS = 100


@asynccontextmanager
async def small_cluster(folder: Path) -> AsyncIterator[tuple[Cluster, MetaClient]]:
    """One broker, and a metaserver that often goes on with creations."""
    cluster = Cluster(folder, 1, meta_settings=f"repair_ms = {REPAIR_MS}\n")
    network = HttpNetwork()
    try:
        yield cluster, MetaClient(network, [cluster.meta])
    finally:
        await network.close()
        cluster.stop()


async def assert_goes_on(cluster: Cluster, meta: MetaClient) -> None:
    """The metaserver lives, many rounds of its periodic work later."""
    await asyncio.sleep(10 * REPAIR_MS / 1000)
    assert cluster.meta_program.process.poll() is None
    assert (await meta.health()).ready


async def test_a_subject_whose_name_is_as_long_as_it_may_be(tmp_path: Path) -> None:
    """It is created, written, resized and read; a longer name is refused, and stores nothing."""
    async with small_cluster(tmp_path) as (cluster, meta):
        name = "s" * NAME_CHARS_MAX
        route = await cluster.create(name, partitions=1)
        assert [one.name for one in route.partitions] == [f"{name}.p0"]
        await cluster.reshape(
            Reshape(kind=OperationKind.RESIZE, subject=name, partitions=12), seconds=60
        )
        cluster.brokers[0].kill()
        cluster.brokers[0].restart()
        handled: list[Message] = []
        async with Consumer(cluster.meta, subject=name, group="g", handler=handled.append):
            async with Producer(cluster.meta) as producer:
                await producer.send(name, b"value", key=b"key")
            await eventually(lambda: handled)
        assert [one.value for one in handled] == [b"value"]
        with pytest.raises(InvalidNameError):
            await meta.create_subject(CreateSubject(subject=name + "s"))
        await assert_goes_on(cluster, meta)
        assert [one.subject for one in (await meta.subjects()).subjects] == [name]


async def test_a_creation_over_a_lost_database(tmp_path: Path) -> None:
    """Ids that a broker has given away already hold up that creation alone, and it says so, over a restart too."""
    async with small_cluster(tmp_path) as (cluster, meta):
        await cluster.create("old", partitions=2)
        cluster.meta_program.kill()
        shutil.rmtree(tmp_path / "meta-0")
        cluster.meta_program.restart()
        ask = CreateSubject(subject="new", partitions=2)
        async with asyncio.timeout(30):
            while not (await meta.health()).details["brokers"]:
                await asyncio.sleep(0.05)
        with pytest.raises(NotEnoughBrokersError, match=r"'g1': .* is hosted with other facts"):
            await meta.create_subject(ask)
        await assert_goes_on(cluster, meta)
        cluster.meta_program.kill()
        cluster.meta_program.restart()
        await assert_goes_on(cluster, meta)
        await cluster.create("next", partitions=1)
        assert [one.subject for one in (await meta.subjects()).subjects] == ["next"]
