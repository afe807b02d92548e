"""Readers that ask copies: a broker has no reads of what its copy has, and all of the others."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from keylane import Producer, Reader
from keylane.admin import Admin
from keylane.rpc.http_network import HttpNetwork
from keylane.spark.source import KeylaneSource
from support.brokers.broker_process import BrokerProcess
from support.brokers.spare import Spare
from support.cluster import Cluster

SUBJECT = "orders"
COUNT = 3_000
pytestmark = [pytest.mark.crash, pytest.mark.cluster(brokers=1), pytest.mark.timeout(240)]


@pytest.fixture
def serving(cluster: Cluster, tmp_path: Path):
    """A follower that serves reads."""
    serving = Spare(cluster, tmp_path / "serving", "--serve-reads", "true")
    yield serving
    serving.kill()


async def send(meta: str, numbers: range) -> None:
    async with Producer(meta) as producer:
        await asyncio.gather(
            *(
                producer.send(SUBJECT, b"%d" % number, key=b"key-%d" % (number % 7))
                for number in numbers
            )
        )


async def read_numbers(meta: str) -> list[int]:
    async with Reader(meta, SUBJECT, from_copies=True) as reader:
        return [int(message.value) async for message in reader]


async def figure(address: str, name: str, **labels: str) -> float:
    """Return the sum of a figure of a server."""
    network = HttpNetwork()
    try:
        text, _ = await network.get_text(address, "/metrics", timeout_ms=5_000)
    finally:
        await network.close()
    return sum(
        sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    )


async def reads_of(address: str) -> float:
    return await figure(address, "keylane_broker_request_seconds_count", kind="read")


async def copy_address(meta: str) -> tuple[str, str]:
    """Return the addresses of the broker, and of its copy when that serves reads."""
    async with Admin(meta) as admin, asyncio.timeout(30):
        [broker] = (await admin.list_brokers()).brokers
        while True:
            copies = (await admin.broker_health(broker.address)).details["copies"]
            for view in copies.values():
                if view["reads_at"] and not view["bytes_behind"]:
                    return broker.address, view["reads_at"]
            await asyncio.sleep(0.05)


async def until_copied(meta: str) -> tuple[str, str]:
    """Wait until the copy serves everything that was sent; return both addresses."""
    broker, copy = await copy_address(meta)
    async with asyncio.timeout(30):
        while True:
            before = await reads_of(broker)
            await read_numbers(meta)
            if await reads_of(broker) == before:
                return broker, copy
            await asyncio.sleep(0.1)


async def test_broker_reads_nothing_when_its_copy_has_everything(
    cluster: Cluster, serving: Spare
) -> None:
    """What comes after that is read from the broker, until the copy has it too."""
    await cluster.create(SUBJECT, partitions=3)
    serving.start()
    await send(cluster.meta, range(COUNT))
    broker, copy = await until_copied(cluster.meta)
    before = await reads_of(broker), await figure(copy, "keylane_copy_read_bytes_total")
    assert sorted(await read_numbers(cluster.meta)) == list(range(COUNT))
    command = [sys.executable, "-m", "keylane.cli", "read", SUBJECT, "--from-copies"]
    printed = await asyncio.to_thread(
        subprocess.run,
        [*command, "--meta", cluster.meta],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert len(printed.stdout.splitlines()) == COUNT
    assert await reads_of(broker) == before[0]
    assert await figure(copy, "keylane_copy_read_bytes_total") > before[1]
    serving.signal(signal.SIGSTOP)
    await send(cluster.meta, range(COUNT, COUNT + 100))
    began = time.monotonic()
    assert sorted(await read_numbers(cluster.meta)) == list(range(COUNT + 100))
    assert time.monotonic() - began < 30, "a copy that does not answer is asked once"
    serving.signal(signal.SIGCONT)
    await until_copied(cluster.meta)


async def test_copy_serves_reads_again_when_its_follower_was_killed(
    cluster: Cluster, serving: Spare
) -> None:
    """A promotion makes of it a broker with all messages."""
    await cluster.create(SUBJECT, partitions=3)
    serving.start()
    await send(cluster.meta, range(COUNT))
    await until_copied(cluster.meta)
    for round_number in (1, 2):
        await asyncio.to_thread(serving.kill)
        serving.start()
        await send(cluster.meta, range(COUNT * round_number, COUNT * (round_number + 1)))
        await until_copied(cluster.meta)
    assert sorted(await read_numbers(cluster.meta)) == list(range(3 * COUNT))
    await asyncio.to_thread(serving.kill)
    await asyncio.to_thread(cluster.brokers[0].kill)
    command = [sys.executable, "-m", "keylane.cli", "broker", "promote", str(serving.folder)]

    def promote() -> bool:
        done = subprocess.run(
            [*command, "--meta", cluster.meta, "--yes"],
            capture_output=True,
            timeout=60,
            check=False,
        )
        return done.returncode == 0

    async with asyncio.timeout(60):
        while not await asyncio.to_thread(promote):
            await asyncio.sleep(0.5)
    broker = BrokerProcess(serving.folder, "--meta", cluster.meta, "--host", "127.0.0.2")
    await asyncio.to_thread(broker.start)
    try:
        async with Reader(cluster.meta, SUBJECT, wait_s=30) as reader:
            assert sorted([int(each.value) async for each in reader]) == list(range(3 * COUNT))
    finally:
        await asyncio.to_thread(broker.end)


async def test_copy_that_serves_reads_takes_over_when_its_broker_is_killed(
    cluster: Cluster, tmp_path: Path
) -> None:
    """Its clients find everything at the broker that it is now."""
    serving = Spare(cluster, tmp_path / "serving", "--serve-reads", "true", "--failover", "true")
    await cluster.create(SUBJECT, partitions=3)
    try:
        serving.start()
        async with Admin(cluster.meta) as admin:
            await admin.set_copies("g1", 2, may_share_machine=True)
            async with asyncio.timeout(30):
                while not (await admin.copies("g1")).members:
                    await asyncio.sleep(0.05)
        await send(cluster.meta, range(COUNT))
        await until_copied(cluster.meta)
        async with Reader(cluster.meta, SUBJECT, from_copies=True, wait_s=30) as reader:
            read = [int((await anext(reader)).value)]
            await asyncio.to_thread(cluster.brokers[0].kill)
            await send(cluster.meta, range(COUNT, 2 * COUNT))
            read += [int(message.value) async for message in reader]
        assert len(read) == len(set(read))
        assert set(read) >= set(range(COUNT))
        async with Admin(cluster.meta) as admin:
            [broker] = (await admin.list_brokers()).brokers
        assert broker.address != cluster.brokers[0].address
        assert sorted(await read_numbers(cluster.meta)) == list(range(2 * COUNT))
    finally:
        await asyncio.to_thread(serving.kill)


async def test_broker_reads_nothing_for_spark_when_its_copy_has_everything(
    cluster: Cluster, serving: Spare
) -> None:
    await cluster.create(SUBJECT, partitions=3)
    serving.start()
    await send(cluster.meta, range(COUNT))
    broker, copy = await until_copied(cluster.meta)

    def read(**options: str) -> list[int]:
        source = KeylaneSource({"meta": cluster.meta, "subject": SUBJECT, **options})
        reader = source.reader(source.schema())
        batches = [batch for part in reader.partitions() for batch in reader.read(part)]
        return sorted(int(value.as_py()) for batch in batches for value in batch.column("value"))

    before = await reads_of(broker), await figure(copy, "keylane_copy_read_bytes_total")
    assert await asyncio.to_thread(read, fromCopies="true") == list(range(COUNT))
    assert await reads_of(broker) == before[0]
    assert await figure(copy, "keylane_copy_read_bytes_total") > before[1]
    await asyncio.to_thread(serving.kill)
    assert await asyncio.to_thread(read, fromCopies="true") == list(range(COUNT))
    after = await reads_of(broker)
    assert after > before[0]
    assert await asyncio.to_thread(read) == list(range(COUNT))
    assert await reads_of(broker) > after, "it is asked where the option is off"
