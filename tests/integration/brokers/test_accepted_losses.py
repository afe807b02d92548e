"""A broker's disk is lost for good: an operator accepts the loss, strict subjects continue, and
every client is told.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
from pathlib import Path
from urllib.request import urlopen

import pytest

from keylane import Consumer, Message, Producer
from keylane.consumer import ConsumerSettings
from keylane.producer import ProducerSettings
from keylane.protocol import endpoints
from keylane.protocol.errors import Fate, InvalidRequestError, Reason
from keylane.protocol.message import Receipt
from keylane.protocol.operations import OperationKind, Reshape
from keylane.protocol.routing import PartitionState, logical_partition
from keylane.rpc.client import MetaClient
from keylane.rpc.http_network import HttpNetwork
from support.brokers.broker_process import BrokerProcess
from support.cluster import Cluster, alert_cluster, assert_order_per_key, eventually, pause, silent
from support.server_process import run_keylane

CONSUMING = ConsumerSettings(ttl_ms=1_500)
SENDING = ProducerSettings(call_timeout_ms=1_000)
LOSE = Reshape(kind=OperationKind.EVACUATE, broker_group="g2", accept_loss=True)


def keylane(cluster: Cluster, *words: str) -> subprocess.CompletedProcess[str]:
    """Run the command line."""
    return run_keylane(*words, "--meta", cluster.meta)


def registration(address: str) -> str:
    with urlopen(f"http://{address}/v1/health") as answer:
        return str(json.load(answer)["details"]["registration"])


async def dry_run_names_the_losses(cluster: Cluster, lost_ids: set[int]) -> None:
    would = await asyncio.to_thread(
        keylane, cluster, *("subject", "evacuate", "g2"), "--accept-loss", "--dry-run"
    )
    assert would.returncode == 0, would.stderr
    for partition_id in sorted(lost_ids):
        assert (
            f"partition {partition_id} of s would be given up: its end is not known" in would.stdout
        )
    assert "not read to its end by g" in would.stdout


async def assert_only_these_are_lost(
    doubtful: dict[bytes, asyncio.Future[Receipt]], there: set[bytes]
) -> None:
    """Messages to the lost disk fail with an unknown fate; the others, sent at the same time, are
    stored.
    """
    for key, future in doubtful.items():
        (outcome,) = await asyncio.gather(future, return_exceptions=True)
        if key in there:
            assert outcome.reason is Reason.ACCEPTED_AS_LOST
            assert outcome.fate is Fate.UNKNOWN
        else:
            assert isinstance(outcome, Receipt)


async def assert_history_names(meta: MetaClient, lost_ids: set[int]) -> None:
    history = {
        past.partition.partition_id: past
        for past in (await meta.call(endpoints.HISTORY, subject="s")).partitions
    }
    assert {key for key, past in history.items() if past.lost} == lost_ids
    for partition_id in lost_ids:
        assert history[partition_id].partition.state is PartitionState.EXPIRED


async def test_strict_subject_continues_when_the_loss_of_a_disk_is_accepted(
    tmp_path: Path,
) -> None:
    """What may be on the lost disk fails with an unknown fate, what was never sent is stored and
    handled in order.
    """
    with alert_cluster(tmp_path) as cluster:
        route = await cluster.create("s", partitions=4, strategy="strict")
        lost_ids = {
            partition.partition_id
            for partition in route.partitions
            if partition.broker_group == "g2"
        }
        network = HttpNetwork()
        meta = MetaClient(network, [cluster.meta])
        homes = [
            partition.partition_id
            for partition in route.open_partitions()
            for _ in range(partition.range_start, partition.range_end)
        ]
        keys = [b"k%d" % number for number in range(40)]
        there = {key for key in keys if homes[logical_partition(key)] in lost_ids}
        assert 0 < len(there) < len(keys)
        handled: list[Message] = []
        try:
            async with (
                Consumer(
                    cluster.meta, subject="s", group="g", handler=handled.append, settings=CONSUMING
                ),
                Producer(cluster.meta, settings=SENDING) as producer,
            ):
                await asyncio.gather(*(producer.send("s", b"0", key=key) for key in keys))
                await eventually(lambda: len(handled) == len(keys))
                broker = cluster.brokers[1]
                pause(broker.process.pid)
                doubtful = {key: producer.send("s", b"1", key=key) for key in keys}
                await asyncio.sleep(2.5)
                newer = {key: producer.send("s", b"2", key=key) for key in keys}
                broker.kill()
                (tmp_path / "broker-2").rename(tmp_path / "found-again")
                await silent(meta, "g2")

                await dry_run_names_the_losses(cluster, lost_ids)
                assert not any(newer[key].done() for key in there)

                done = await asyncio.to_thread(
                    keylane, cluster, *("subject", "evacuate", "g2"), "--accept-loss"
                )
                assert done.returncode == 0, done.stdout + done.stderr
                async with asyncio.timeout(60):
                    await assert_only_these_are_lost(doubtful, there)
                    stored = await asyncio.gather(*newer.values())
                assert not any(receipt.reordered for receipt in stored)
                values = {key: [b"0", b"2"] if key in there else [b"0", b"1", b"2"] for key in keys}
                total = sum(map(len, values.values()))
                await eventually(lambda: len(handled) >= total, seconds=60)
            assert_order_per_key(handled, values)
            await assert_history_names(meta, lost_ids)
            await refused_and_replaced(cluster, meta, tmp_path)
        finally:
            await network.close()


async def refused_and_replaced(cluster: Cluster, meta: MetaClient, folder: Path) -> None:
    """The folder that was given up does not come back; an empty one takes its place."""
    returned = BrokerProcess(folder / "found-again", "--meta", cluster.meta, group="g2")
    returned.start()
    try:
        await eventually(lambda: "was accepted" in registration(returned.address))
    finally:
        returned.end()
    fresh = BrokerProcess(folder / "fresh", "--meta", cluster.meta, group="g2")
    fresh.start()
    try:
        await eventually(lambda: registration(fresh.address) == "registered")
        async with asyncio.timeout(60):
            while any(check.violations for check in (await meta.call(endpoints.VERIFY)).checks):
                await asyncio.sleep(0.2)
    finally:
        fresh.end()


async def test_loss_is_not_accepted_while_the_broker_answers(cluster: Cluster) -> None:
    """A loss is refused while the broker answers."""
    await cluster.create("s", partitions=2)
    network = HttpNetwork()
    try:
        with pytest.raises(InvalidRequestError, match="is running"):
            await MetaClient(network, [cluster.meta]).call(endpoints.RESHAPE, LOSE)
    finally:
        await network.close()


async def test_parents_of_a_lost_partition_are_read_first(tmp_path: Path) -> None:
    """Parents of a lost partition on other brokers are drained before its children."""
    with alert_cluster(tmp_path) as cluster:
        route = await cluster.create("s", partitions=1, strategy="strict")
        (only,) = route.partitions
        home = cluster.brokers[0] if only.broker_group == "g1" else cluster.brokers[1]
        other = "g2" if only.broker_group == "g1" else "g1"
        network = HttpNetwork()
        meta = MetaClient(network, [cluster.meta])
        handled: list[Message] = []
        try:
            async with Producer(cluster.meta) as producer:
                for number in range(50):
                    await producer.send("s", b"%d" % number, key=b"k")
            move = Reshape(
                kind=OperationKind.MOVE, partition_ids=(only.partition_id,), broker_group=other
            )
            await cluster.reshape(move)
            away = next(broker for broker in cluster.brokers if broker is not home)
            async with Producer(cluster.meta) as producer:
                await producer.send("s", b"lost", key=b"k")
            away.kill()
            shutil.rmtree(tmp_path / f"broker-{other[1:]}")
            await silent(meta, other)
            await cluster.reshape(
                Reshape(kind=OperationKind.EVACUATE, broker_group=other, accept_loss=True)
            )
            async with Producer(cluster.meta) as producer:
                await producer.send("s", b"newer", key=b"k")
            async with Consumer(
                cluster.meta, subject="s", group="g", handler=handled.append, settings=CONSUMING
            ):
                await eventually(lambda: len(handled) == 51)
        finally:
            await network.close()
        assert [message.value for message in handled] == [
            b"%d" % number for number in range(50)
        ] + [b"newer"]


async def test_dry_run_shows_losses_when_a_plain_evacuation_has_begun(tmp_path: Path) -> None:
    """The evacuation waits for the broker, whose disk is lost; the dry run gives nothing up."""
    with alert_cluster(tmp_path) as cluster:
        route = await cluster.create("s", partitions=2, strategy="strict")
        (there,) = (
            partition.partition_id
            for partition in route.partitions
            if partition.broker_group == LOSE.broker_group
        )
        network = HttpNetwork()
        meta = MetaClient(network, [cluster.meta])
        try:
            cluster.brokers[1].kill()
            await silent(meta, LOSE.broker_group)
            await meta.call(
                endpoints.RESHAPE, Reshape(kind=OperationKind.EVACUATE, broker_group="g2")
            )
            words = ("broker", "evacuate", "g2", "--accept-loss")
            would = await asyncio.to_thread(keylane, cluster, *words, "--dry-run")
            assert would.returncode == 0, would.stderr
            assert f"partition {there} of s would be given up: its end is not known" in would.stdout
            assert not any(
                past.lost for past in (await meta.call(endpoints.HISTORY, subject="s")).partitions
            )
            done = await asyncio.to_thread(keylane, cluster, *words)
            assert done.returncode == 0, done.stdout + done.stderr
            lost = [
                past.partition.partition_id
                for past in (await meta.call(endpoints.HISTORY, subject="s")).partitions
                if past.lost
            ]
            assert lost == [there]
        finally:
            await network.close()
