"""An older copy of a broker's folder that an operator accepts: what a consumer group it lacks has
not read stays.
"""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import pytest

from integration.retention.test_dead_groups import SEGMENT, dies_when_granted, handled, send
from keylane.protocol import endpoints
from keylane.protocol.control import AcceptFolder
from keylane.protocol.errors import InvalidRequestError
from keylane.protocol.operations import OperationKind, OperationState, Reshape
from keylane.rpc.client import BrokerClient, MetaClient
from keylane.rpc.http_network import HttpNetwork
from support.brokers.broker_process import BrokerProcess
from support.cluster import Cluster, alert_cluster, silent


async def test_accepted_copy_keeps_messages_of_a_group_younger_than_the_copy(
    tmp_path: Path,
) -> None:
    """The copy is told all groups again before it removes what the groups it knows have handled,
    restarted or not.
    """
    settings = "expire_ms = 1000\nbroker_heartbeat_ms = 200\nbroker_ttl_ms = 1500\n"
    broker = f"segment_bytes = {SEGMENT}\nretention_bytes = {2 * SEGMENT}\n"
    cluster = Cluster(tmp_path, 1, meta_settings=settings, broker_settings=broker)
    network = HttpNetwork()
    config = ("--meta", cluster.meta, "--config", str(tmp_path / "broker.toml"))
    copy = BrokerProcess(tmp_path / "copy", *config)
    try:
        await cluster.create("orders", partitions=1)
        meta = MetaClient(network, [cluster.meta])
        await dies_when_granted(meta, "alive")
        sent = await send(cluster, 0)
        original = cluster.brokers[0]
        original.kill()
        shutil.copytree(tmp_path / "broker-1", tmp_path / "copy")
        original.restart()
        await dies_when_granted(meta, "dead")
        original.kill()
        await silent(meta, "g1")
        copy.start()
        async with asyncio.timeout(60):
            while not (await meta.health()).details.get("refused"):
                await asyncio.sleep(0.05)
        await meta.call(endpoints.ACCEPT_FOLDER, AcceptFolder(), group="g1")
        await handled(cluster, "alive", sent)
        copy.end()
        copy.start()
        broker_client = BrokerClient(network, copy.address)
        async with asyncio.timeout(60):
            while "has not acked" not in (await broker_client.health()).details["retention"]:
                await asyncio.sleep(0.05)
        (partition,) = (await broker_client.partitions()).partitions
        assert {progress.group for progress in partition.groups} == {"alive", "dead"}
        assert [
            check.name for check in (await meta.call(endpoints.VERIFY)).checks if check.violations
        ] == []
        await handled(cluster, "dead", sent)
    finally:
        await network.close()
        copy.kill()
        cluster.stop()


async def test_copy_from_before_a_resize_is_not_accepted(tmp_path: Path) -> None:
    """The copy lacks partitions that no other broker has: the refusal names them, and the disk is
    given up instead.
    """
    with alert_cluster(tmp_path) as cluster:
        await cluster.create("orders", partitions=2)
        network = HttpNetwork()
        meta = MetaClient(network, [cluster.meta])
        try:
            original = cluster.brokers[0]
            original.kill()
            shutil.copytree(tmp_path / "broker-1", tmp_path / "copy")
            original.restart()
            views = await cluster.reshape(
                Reshape(kind=OperationKind.RESIZE, subject="orders", partitions=4)
            )
            assert [view.state for view in views] == [OperationState.DONE]
            original.kill()
            shutil.rmtree(tmp_path / "broker-1")
            shutil.move(tmp_path / "copy", tmp_path / "broker-1")
            await silent(meta, "g1")
            original.restart()
            async with asyncio.timeout(60):
                while not (await meta.health()).details.get("refused"):
                    await asyncio.sleep(0.05)
            for dry_run in (True, False):
                with pytest.raises(InvalidRequestError, match=r"not in the copy.*--accept-loss"):
                    await meta.call(
                        endpoints.ACCEPT_FOLDER, AcceptFolder(dry_run=dry_run), group="g1"
                    )
            original.kill()
            lose = Reshape(kind=OperationKind.EVACUATE, broker_group="g1", accept_loss=True)
            views = await cluster.reshape(lose)
            assert [view.state for view in views] == [OperationState.DONE]
            route = await meta.route("orders")
            assert {partition.broker_group for partition in route.open_partitions()} == {"g2"}
        finally:
            await network.close()
