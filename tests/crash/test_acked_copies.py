"""A copy that acks wait for: nothing acked is lost with the broker's folder."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from keylane import Producer, Reader
from keylane.admin import Admin
from keylane.errors import KeylaneError
from support.brokers.broker_process import BrokerProcess
from support.brokers.spare import Spare
from support.cluster import Cluster, eventually

SUBJECT = "orders"
pytestmark = [pytest.mark.crash, pytest.mark.cluster(brokers=1), pytest.mark.timeout(240)]


async def wait_for_members(meta: str, count: int) -> None:
    async with Admin(meta) as admin:
        async with asyncio.timeout(30):
            while len((await admin.copies("g1")).members) != count:
                await asyncio.sleep(0.05)


async def send_until_killed(meta: str, acked: list[int]) -> None:
    """Send numbered messages of seven keys one after another, and note those that are acked."""
    async with Producer(meta) as producer:
        for number in range(len(acked), 1_000_000):
            try:
                await producer.send(SUBJECT, b"%d" % number, key=b"key-%d" % (number % 7))
            except KeylaneError:
                return
            acked.append(number)


def promote(cluster: Cluster, folder: Path, *more: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "keylane.cli", "broker", "promote", str(folder), *more]
    return subprocess.run(
        [*command, "--meta", cluster.meta], capture_output=True, text=True, timeout=60, check=False
    )


def run_command(cluster: Cluster, *words: str) -> list[Any]:
    """Run a command, and return the objects that it prints."""
    command = [sys.executable, "-m", "keylane.cli", *words, "--meta", cluster.meta]
    run = subprocess.run(
        [*command, "--output", "json"], capture_output=True, text=True, timeout=60, check=False
    )
    assert run.stdout, run.stderr
    return [json.loads(line) for line in run.stdout.splitlines()]


async def test_every_acked_message_is_on_the_copy_when_the_folder_is_gone(
    cluster: Cluster, spare: Spare, tmp_path: Path
) -> None:
    await cluster.create(SUBJECT, partitions=3)
    spare.start()
    async with Admin(cluster.meta) as admin:
        assert (await admin.set_copies("g1", 2, may_share_machine=True)).wanted == 2
    await wait_for_members(cluster.meta, 1)
    acked: list[int] = []
    sending = asyncio.create_task(send_until_killed(cluster.meta, acked))
    await eventually(lambda: len(acked) > 1_000, seconds=60)
    async with Admin(cluster.meta) as admin:
        assert (await admin.copies("g1")).members, "the machine is too slow for copy_lag_ms"
    await asyncio.to_thread(cluster.brokers[0].kill)
    shutil.rmtree(tmp_path / "broker-1")
    await asyncio.to_thread(spare.kill)
    sending.cancel()
    await asyncio.gather(sending, return_exceptions=True)
    until = time.monotonic() + 30
    while (promoted := await asyncio.to_thread(promote, cluster, spare.folder)).returncode:
        assert "BROKER_SERVES" in promoted.stderr
        assert time.monotonic() < until
        await asyncio.sleep(0.5)
    broker = BrokerProcess(spare.folder, "--meta", cluster.meta, "--host", "127.0.0.2")
    await asyncio.to_thread(broker.start)
    try:
        async with Producer(cluster.meta) as producer:
            await producer.send(SUBJECT, b"1000000", key=b"key-0")
        async with Reader(cluster.meta, SUBJECT) as reader:
            read = [int(message.value) async for message in reader]
        assert set(acked) <= set(read)
        assert read.count(1_000_000) == 1
    finally:
        await asyncio.to_thread(broker.end)


async def test_acks_go_on_without_a_copy_that_was_stopped(cluster: Cluster, spare: Spare) -> None:
    """After copy_lag_ms; and wait for it again when it has everything."""
    await cluster.create(SUBJECT)
    spare.start()
    async with Admin(cluster.meta) as admin:
        await admin.set_copies("g1", 2, may_share_machine=True)
    await wait_for_members(cluster.meta, 1)
    await asyncio.to_thread(spare.kill)
    async with Producer(cluster.meta) as producer:
        began = time.monotonic()
        async with asyncio.timeout(30):
            await producer.send(SUBJECT, b"one", key=b"k")
        assert time.monotonic() - began > 1.5
        await wait_for_members(cluster.meta, 0)
        await producer.send(SUBJECT, b"two", key=b"k")
    spare.start()
    await wait_for_members(cluster.meta, 1)


async def test_ack_waits_for_a_copy_that_was_killed_when_it_needs_two_folders(
    cluster: Cluster, spare: Spare
) -> None:
    """The copy stays in the set, and the broker says what it waits for."""
    await cluster.create(SUBJECT)
    spare.start()
    async with Admin(cluster.meta) as admin:
        assert (await admin.set_copies("g1", 2, least=2, may_share_machine=True)).least == 2
        await wait_for_members(cluster.meta, 1)
        await asyncio.to_thread(spare.kill)
        async with Producer(cluster.meta) as producer:
            sending = asyncio.ensure_future(producer.send(SUBJECT, b"one", key=b"k"))
            done, _ = await asyncio.wait((sending,), timeout=6)
            assert not done
            assert len((await admin.copies("g1")).members) == 1
            health = await admin.broker_health(cluster.brokers[0].address)
            assert "until 2 data folders have everything, and 1 has it" in health.reason
            spare.start()
            assert (await asyncio.wait_for(sending, 60)).copies == 2


async def test_acks_wait_for_a_copy_on_the_brokers_machine_only_if_somebody_says_so(
    cluster: Cluster, spare: Spare, tmp_path: Path
) -> None:
    """One on another machine joins; the other one says in the command why it does not."""
    await cluster.create(SUBJECT)
    spare.start()
    async with Admin(cluster.meta) as admin:
        await admin.set_copies("g1", 3)
    there = Spare(cluster, tmp_path / "there", "--machine", "m2", "--zone", "z2")
    there.start()
    try:
        await wait_for_members(cluster.meta, 1)
        async with Producer(cluster.meta) as producer:
            assert (await producer.send(SUBJECT, b"one", key=b"k")).copies == 2
        await asyncio.sleep(1)
        [view] = await asyncio.to_thread(run_command, cluster, "broker", "copies", "g1")
        counted, refused = view["copies"]
        assert (counted["in_set"], counted["machine"], counted["zone"]) == (True, "m2", "z2")
        assert not refused["in_set"]
        assert refused["machine"] == view["machine"]
        assert "on the same machine as the broker" in refused["shared_machine"]
        found = await asyncio.to_thread(run_command, cluster, "cluster", "check")
        assert refused["shared_machine"] in {each["problem"] for each in found[0]["findings"]}
        await asyncio.to_thread(
            run_command, cluster, "broker", "copies", "g1", "--allow-one-machine"
        )
        await wait_for_members(cluster.meta, 2)
    finally:
        await asyncio.to_thread(there.kill)


async def test_copy_that_lacks_acked_messages_serves_when_an_operator_has_accepted_that(
    cluster: Cluster, spare: Spare, tmp_path: Path
) -> None:
    """It is promoted only with a word, and then refused as an older copy."""
    await cluster.create(SUBJECT, partitions=1)
    spare.start()
    async with Admin(cluster.meta) as admin:
        await admin.set_copies("g1", 2, may_share_machine=True)
    await wait_for_members(cluster.meta, 1)
    async with Producer(cluster.meta) as producer:
        assert (await producer.send(SUBJECT, b"1", key=b"k")).copies == 2
        await asyncio.to_thread(spare.kill)
        for value in (b"2", b"3"):
            assert (await producer.send(SUBJECT, value, key=b"k")).copies == 1
    await asyncio.sleep(1)  # the broker reports the end of its log
    await asyncio.to_thread(cluster.brokers[0].kill)
    shutil.rmtree(tmp_path / "broker-1")
    until = time.monotonic() + 30
    while (
        "COPY_LACKS_ACKED"
        not in (refused := await asyncio.to_thread(promote, cluster, spare.folder)).stderr
    ):
        assert "BROKER_SERVES" in refused.stderr
        assert time.monotonic() < until
        await asyncio.sleep(0.5)
    promoted = await asyncio.to_thread(promote, cluster, spare.folder, "--yes")
    assert promoted.returncode == 0, promoted.stderr
    broker = BrokerProcess(spare.folder, "--meta", cluster.meta, "--host", "127.0.0.2")
    await asyncio.to_thread(broker.start)
    try:
        async with Admin(cluster.meta) as admin:
            async with asyncio.timeout(30):
                while not (await admin.list_brokers()).refused:
                    await asyncio.sleep(0.1)
            await admin.accept_folder("g1")
        async with Producer(cluster.meta) as producer:
            await producer.send(SUBJECT, b"4", key=b"k")
        async with Reader(cluster.meta, SUBJECT) as reader:
            assert [message.value async for message in reader] == [b"1", b"4"]
    finally:
        await asyncio.to_thread(broker.end)
