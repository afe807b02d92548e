"""Creations that a real broker hinders, and the longest names: no metaserver ends by them."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from msgspec.structs import replace

from keylane import Consumer, Message, Producer
from keylane.consumer import ConsumerSettings
from keylane.protocol import endpoints
from keylane.protocol.control import CreateSubject, HostPartition
from keylane.protocol.errors import (
    OutcomeUnknownError,
    Reason,
    UnavailableError,
)
from keylane.protocol.ids import NAME_CHARS_MAX
from keylane.protocol.operations import OperationKind, Reshape
from keylane.protocol.routing import OrderStrategy, PartitionState, Route
from keylane.rpc.client import BrokerClient, MetaClient
from keylane.rpc.http_network import HttpNetwork
from support.cluster import Cluster, eventually
from support.lost_database import rebuild_lost_database
from support.raising import raises

REPAIR_MS = 100


TTL_MS = 1_500


@asynccontextmanager
async def small_cluster(
    folder: Path, *, brokers: int = 1
) -> AsyncIterator[tuple[Cluster, MetaClient]]:
    """A metaserver that retries creations often, and soon counts a broker as silent."""
    settings = f"repair_ms = {REPAIR_MS}\nbroker_ttl_ms = {TTL_MS}\nbroker_heartbeat_ms = 200\n"
    cluster = Cluster(folder, brokers, meta_settings=settings)
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


async def test_subject_with_the_longest_name_is_created(tmp_path: Path) -> None:
    """It is created, written, resized and read; a longer name is refused, and stores nothing."""
    async with small_cluster(tmp_path) as (cluster, meta):
        name = "s" * NAME_CHARS_MAX
        route = await cluster.create(name, partitions=1)
        assert [partition.name for partition in route.partitions] == [f"{name}.p0"]
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
        assert [message.value for message in handled] == [b"value"]
        with raises(Reason.NAME_INVALID):
            await meta.create_subject(CreateSubject(subject=name + "s"))
        await assert_goes_on(cluster, meta)
        assert [subject.subject for subject in (await meta.call(endpoints.SUBJECTS)).subjects] == [
            name
        ]


async def test_empty_database_is_not_ready_beside_brokers_with_partitions(
    tmp_path: Path,
) -> None:
    """Calls are refused and name the command that helps, also after a restart; the command ends
    that.
    """
    async with small_cluster(tmp_path) as (cluster, meta):
        route = await cluster.create("old", partitions=2)
        cluster.meta_program.kill()
        shutil.rmtree(tmp_path / "meta-0")
        for _ in range(2):
            cluster.meta_program.restart()
            async with asyncio.timeout(60):
                while (health := await meta.health()).ready or not health.details["brokers"]:
                    await asyncio.sleep(0.05)
            assert "keylane meta rebuild" in health.reason
            for call in (
                lambda: meta.create_subject(CreateSubject(subject="new", partitions=1)),
                lambda: meta.create_subject(CreateSubject(subject="old", partitions=2)),
                lambda: meta.call(endpoints.SUBJECTS),
                lambda: meta.route("old"),
                lambda: meta.call(
                    endpoints.RESHAPE,
                    Reshape(kind=OperationKind.RESIZE, subject="old", partitions=3),
                ),
                lambda: meta.call(
                    endpoints.RESHAPE, Reshape(kind=OperationKind.EVACUATE, broker_group="g1")
                ),
            ):
                with raises(Reason.DATABASE_BEHIND, match="'g1' has 2 partitions") as refused:
                    await call()
                assert "keylane meta rebuild" in refused.value.hint
            cluster.meta_program.kill()
        cluster.meta_program.restart()
        await rebuild_lost_database(cluster, tmp_path)
        async with asyncio.timeout(60):
            while not (await meta.health()).details["brokers"][0]["available"]:
                await asyncio.sleep(0.05)
        assert (await meta.health()).ready
        kept = await meta.route("old")
        assert [partition.partition_id for partition in kept.partitions] == [
            partition.partition_id for partition in route.partitions
        ]


async def test_clients_wait_while_the_database_is_lost(tmp_path: Path) -> None:
    """No client gives up its messages because a database is empty."""
    async with small_cluster(tmp_path) as (cluster, _meta):
        await cluster.create("s", partitions=2)
        handled: list[Message] = []
        soon = ConsumerSettings(ttl_ms=5_000)  # its rebuilt group is granted nothing for a ttl
        async with (
            Producer(cluster.meta) as producer,
            Consumer(cluster.meta, subject="s", group="g", handler=handled.append, settings=soon),
        ):
            await producer.send("s", b"before", key=b"k")
            await eventually(lambda: len(handled) == 1)
            cluster.meta_program.kill()
            shutil.rmtree(tmp_path / "meta-0")
            cluster.meta_program.restart()
            await asyncio.sleep(2)
            await rebuild_lost_database(cluster, tmp_path)
            await producer.send("s", b"after", key=b"k")
            await eventually(lambda: len(handled) == 2, seconds=60)
        assert [message.value for message in handled] == [b"before", b"after"]


async def take_next_number(cluster: Cluster, known: Route) -> int:
    """Have the first broker host a partition under the number that comes next, as after a database
    that went back.
    """
    partition = known.partitions[-1]
    number = partition.partition_id + 1
    other = replace(partition, partition_id=number, name="newer.p0", address=None)
    body = HostPartition(
        subject="newer",
        partition=other,
        order_strategy=OrderStrategy.STRICT,
        partitions_wanted=7,
        groups=(),
    )
    network = HttpNetwork()
    try:
        await BrokerClient(network, cluster.brokers[0].address).control(
            endpoints.HOST_PARTITION, body
        )
    finally:
        await network.close()
    return number


async def test_creation_fails_when_its_partition_id_was_taken_just_now(tmp_path: Path) -> None:
    """The error comes at once and is in the list; the broker's partition stays, and the name may be
    used again.
    """
    async with small_cluster(tmp_path) as (cluster, meta):
        used = await take_next_number(cluster, await cluster.create("old", partitions=2))
        with raises(Reason.CREATION_FAILED, match=r"'g1': .* hosted with other facts"):
            await cluster.create("newer", partitions=1)
        failed = {
            subject.subject: subject for subject in (await meta.call(endpoints.SUBJECTS)).subjects
        }["newer"]
        assert "a newer database or by a different one" in failed.problem
        with raises(Reason.CREATION_FAILED, match="hosted with other facts"):
            await meta.route("newer")
        await assert_goes_on(cluster, meta)

        again = await cluster.create("newer", partitions=3)
        assert used not in {partition.partition_id for partition in again.partitions}
        assert [partition.name for partition in again.partitions] == [
            "newer.p1",
            "newer.p2",
            "newer.p3",
        ]
        assert not any(
            subject.problem for subject in (await meta.call(endpoints.SUBJECTS)).subjects
        )
        network = HttpNetwork()
        try:
            kept = await BrokerClient(network, cluster.brokers[0].address).control(
                endpoints.PARTITION, id=used
            )
        finally:
            await network.close()
        assert kept.state is PartitionState.OPEN


async def test_failed_creation_leaves_no_open_partition(tmp_path: Path) -> None:
    """One partition's id is in use; the others are sealed at their brokers."""
    async with small_cluster(tmp_path) as (cluster, meta):
        await take_next_number(cluster, await cluster.create("old", partitions=1))
        with raises(Reason.CREATION_FAILED, match=r"hosted with other facts, as 'newer\.p0'"):
            await cluster.create("other", partitions=3)
        network = HttpNetwork()
        try:
            broker = BrokerClient(network, cluster.brokers[0].address)
            async with asyncio.timeout(60):
                while True:
                    hosted = (await broker.partitions()).partitions
                    states = [status.state for status in hosted if status.subject == "other"]
                    if states == [PartitionState.SEALED] * 2:
                        break
                    await asyncio.sleep(0.05)
        finally:
            await network.close()
        assert [subject.subject for subject in (await meta.call(endpoints.SUBJECTS)).subjects] == [
            "old",
            "other",
        ]
        await assert_goes_on(cluster, meta)


async def opened(meta: MetaClient, ask: CreateSubject) -> Route:
    """Repeat the creation until it is done."""
    async with asyncio.timeout(60):
        while True:
            try:
                return (await meta.create_subject(ask)).route
            except (UnavailableError, OutcomeUnknownError):
                await asyncio.sleep(0.1)


@pytest.mark.parametrize("asked_again", [True, False])
async def test_creation_goes_elsewhere_when_its_broker_dies_before_it_hosts(
    tmp_path: Path, asked_again: bool
) -> None:
    """The broker is killed between plan and host: the subject opens on the other one, by itself or
    asked by name.
    """
    async with small_cluster(tmp_path, brokers=2) as (cluster, meta):
        await cluster.create("warm", partitions=2)
        cluster.brokers[1].kill()
        ask = CreateSubject(subject="s", partitions=4)
        with raises(Reason.NOT_ENOUGH_BROKERS, match="'g2'"):
            await meta.create_subject(ask)
        if asked_again:
            route = await opened(meta, ask)
        else:
            async with asyncio.timeout(60):
                while "s" not in [
                    subject.subject for subject in (await meta.call(endpoints.SUBJECTS)).subjects
                ]:
                    await asyncio.sleep(0.1)
            route = (await meta.create_subject(ask)).route
        assert {partition.broker_group for partition in route.partitions} == {"g1"}
        assert [partition.queue for partition in route.partitions] == [0, 1, 2, 3]
        handled: list[Message] = []
        async with Consumer(cluster.meta, subject="s", group="g", handler=handled.append):
            async with Producer(cluster.meta) as producer:
                for number in range(40):
                    await producer.send("s", b"value", key=b"%d" % number)
            await eventually(lambda: len(handled) == 40)
        cluster.brokers[1].restart()
        await verified(meta)


async def verified(meta: MetaClient) -> None:
    """Wait until the metaserver and the brokers agree."""
    async with asyncio.timeout(60):
        while not (last := await meta.call(endpoints.VERIFY)).ok:
            await asyncio.sleep(0.2)
    assert last.ok


async def test_id_sent_to_a_broker_that_died_is_never_used_again(tmp_path: Path) -> None:
    """A stopped broker hosts its partition when it continues: by then it was abandoned, is sealed,
    and has another id.
    """
    async with small_cluster(tmp_path, brokers=2) as (cluster, meta):
        warm = await cluster.create("warm", partitions=2)
        stopped = cluster.brokers[1]
        os.kill(stopped.process.pid, signal.SIGSTOP)
        ask = CreateSubject(subject="s", partitions=2)
        creating = asyncio.create_task(opened(meta, ask))
        route = await creating
        assert {partition.broker_group for partition in route.partitions} == {"g1"}
        os.kill(stopped.process.pid, signal.SIGCONT)
        network = HttpNetwork()
        broker = BrokerClient(network, stopped.address)
        known = {partition.partition_id for partition in (*warm.partitions, *route.partitions)}
        async with asyncio.timeout(60):
            while (
                not (
                    left := [
                        partition
                        for partition in (await broker.partitions()).partitions
                        if partition.partition_id not in known
                    ]
                )
                or left[0].state is not PartitionState.SEALED
            ):
                await asyncio.sleep(0.1)
        assert [(status.subject, status.next_offset) for status in left] == [("s", 0)]
        await verified(meta)
        await cluster.reshape(Reshape(kind=OperationKind.RESIZE, subject="s", partitions=4))
        await verified(meta)
        await broker.close()
        await network.close()
