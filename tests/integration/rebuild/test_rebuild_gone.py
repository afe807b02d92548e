"""`keylane meta rebuild --gone`: the database is lost after a broker was evacuated, drained and
taken away.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
from pathlib import Path

from keylane import Consumer, Message, Producer
from keylane.consumer import ConsumerSettings
from keylane.protocol import endpoints
from keylane.protocol.operations import OperationKind, Reshape
from keylane.rpc.client import MetaClient
from keylane.rpc.http_network import HttpNetwork
from support.cluster import Cluster, eventually
from support.server_process import run_keylane

SETTINGS = ConsumerSettings(ttl_ms=1_500)


async def keylane(*arguments: str) -> subprocess.CompletedProcess[str]:
    return await asyncio.to_thread(run_keylane, *arguments)


async def test_cluster_continues_without_a_removed_broker(cluster: Cluster, tmp_path: Path) -> None:
    """The group continues at its cursors, the gone partition is named, and `meta verify` finds no
    fault.
    """
    route = await cluster.create("s", partitions=2, strategy="strict")
    away = [
        partition.partition_id for partition in route.partitions if partition.broker_group == "g1"
    ]
    network = HttpNetwork()
    meta = MetaClient(network, [cluster.meta])
    handled: list[Message] = []
    consumer = Consumer(
        cluster.meta, subject="s", group="g", handler=handled.append, settings=SETTINGS
    )
    async with consumer, Producer(cluster.meta) as producer:
        for number in range(40):
            await producer.send("s", b"%d" % number, key=b"%d" % (number % 8))
        await cluster.reshape(Reshape(kind=OperationKind.EVACUATE, broker_group="g1"))
        for number in range(40, 80):
            await producer.send("s", b"%d" % number, key=b"%d" % (number % 8))
        await eventually(lambda: len(handled) == 80, seconds=60)

    cluster.meta_program.kill()
    cluster.brokers[0].kill()
    shutil.rmtree(tmp_path / "meta-0")
    shutil.rmtree(tmp_path / "broker-1")
    where = ("--data", str(tmp_path / "meta-0"), f"--broker={cluster.brokers[1].address}")
    refused = await keylane("meta", "rebuild", *where, "--complete", "--output=json")
    assert refused.returncode == 1
    assert "--gone" in json.loads(refused.stderr)["message"]
    done = await keylane("meta", "rebuild", *where, "--gone=g1", "--output=json")
    assert done.returncode == 0, done.stderr
    (subject,) = json.loads(done.stdout)
    assert subject["gone"] == [
        {"partition_id": partition_id, "unread_by": []} for partition_id in away
    ]
    assert f"partition {away[0]} of 's' is lost" in done.stderr
    cluster.meta_program.restart()

    consumer = Consumer(
        cluster.meta, subject="s", group="g", handler=handled.append, settings=SETTINGS
    )
    async with consumer, Producer(cluster.meta) as producer:
        for number in range(80, 120):
            await producer.send("s", b"%d" % number, key=b"%d" % (number % 8))
        await eventually(lambda: len(handled) >= 120, seconds=60)
    by_key: dict[bytes, list[int]] = {}
    for message in handled:
        by_key.setdefault(message.key, []).append(int(message.value))
    assert by_key == {b"%d" % key: list(range(key, 120, 8)) for key in range(8)}
    assert [check for check in (await meta.call(endpoints.VERIFY)).checks if check.violations] == []
    await network.close()
