"""Rows that were on their way to a partition whose loss is accepted: an operator decides what
becomes of them.
"""

import asyncio
from pathlib import Path

import pytest

from keylane.outbox import Outbox, OutboxSettings, outbox_status, purge_failed, redrive_failed
from keylane.protocol import endpoints
from keylane.protocol.operations import OperationKind, Reshape
from keylane.protocol.routing import logical_partition
from keylane.rpc.client import BrokerClient, MetaClient
from keylane.rpc.http_network import HttpNetwork
from support.cluster import Cluster, alert_cluster, pause, read_partition, silent
from support.outbox.rows import drained

SETTINGS = OutboxSettings(rescan_ms=100, lease_ms=1_000, call_timeout_ms=500)
LOSE = Reshape(kind=OperationKind.EVACUATE, broker_group="g2", accept_loss=True)


async def key_at(cluster: Cluster, group: str) -> bytes:
    """A key whose partition is at a broker group."""
    route = await cluster.create("s", partitions=2)
    (home,) = [each for each in route.open_partitions() if each.broker_group == group]
    keys = (b"k%d" % number for number in range(1_000))
    return next(key for key in keys if home.range_start <= logical_partition(key) < home.range_end)


async def add(engine, outbox: Outbox, value: bytes, key: bytes) -> None:
    async with engine.begin() as connection:
        await outbox.add(connection, "s", value, key=key)


async def stored(cluster: Cluster) -> list[bytes]:
    """The values on the broker that is left."""
    network = HttpNetwork()
    try:
        route = await MetaClient(network, [cluster.meta]).route("s")
        messages = []
        for partition in route.open_partitions():
            broker = BrokerClient(network, partition.address)
            messages += await read_partition(broker, "s", partition.partition_id)
            await broker.close()
    finally:
        await network.close()
    return [message.value for message in messages]


@pytest.mark.parametrize("redriven", [False, True])
async def test_rows_that_may_be_lost_fail_and_halt_their_key(
    tmp_path: Path, sqlite, redriven: bool
):
    with alert_cluster(tmp_path) as cluster:
        key = await key_at(cluster, "g2")
        network = HttpNetwork()
        meta = MetaClient(network, [cluster.meta])
        try:
            async with Outbox(cluster.meta, sqlite, settings=SETTINGS) as outbox:
                await outbox.send("s", b"before", key=key)
                pause(cluster.brokers[1].process.pid)
                await add(sqlite, outbox, b"doubtful", key)
                async with asyncio.timeout(20):
                    while "s" not in outbox.waiting:
                        await asyncio.sleep(0.05)
                cluster.brokers[1].kill()
                await silent(meta, "g2")
                await meta.call(endpoints.RESHAPE, LOSE)
                async with asyncio.timeout(40):
                    while not (status := await outbox.status()).failed:
                        await asyncio.sleep(0.1)
                assert status.failed_rows[0].key == key
                assert "accepted as lost" in status.failed_rows[0].failure
                await add(sqlite, outbox, b"newer", key)
                async with asyncio.timeout(20):
                    while not (await outbox.status()).subjects[0].halted:
                        await asyncio.sleep(0.1)
                assert await stored(cluster) == []
                change = await (redrive_failed if redriven else purge_failed)(sqlite)
                assert (change.rows, change.failed) == (1, 1)
                await drained(sqlite)
                assert await stored(cluster) == ([b"doubtful"] if redriven else []) + [b"newer"]
                assert (await outbox_status(sqlite)).rows == 0
        finally:
            await network.close()
