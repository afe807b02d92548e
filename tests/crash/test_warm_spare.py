"""A copy that follows a broker on another host, and takes its place when the broker's folder is
gone.
"""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import pytest

from keylane import Producer, Reader
from keylane.broker.offline.promotion import promote_candidate, read_candidate
from keylane.broker.storage.fail_points import make_files
from support.brokers.broker_process import BrokerProcess
from support.brokers.spare import Spare, segments_of
from support.cluster import Cluster, eventually

SUBJECT = "orders"
pytestmark = [pytest.mark.crash, pytest.mark.cluster(brokers=1), pytest.mark.timeout(240)]


def is_copy_of(folder: Path, copy: Path) -> bool:
    """Whether the copy has all segments; the last one has zeros after its end at the broker."""
    mine, copied = segments_of(folder), segments_of(copy)
    return mine.keys() == copied.keys() and all(
        data.rstrip(b"\0") == copied[name].rstrip(b"\0") for name, data in mine.items()
    )


async def send(meta: str, start: int, count: int) -> None:
    """Send numbered messages of seven keys, and wait for their acks."""
    async with Producer(meta) as producer:
        for number in range(start, start + count):
            producer.send(SUBJECT, b"%d" % number, key=b"key-%d" % (number % 7))
            await producer.drain()
        await producer.flush()


async def test_copy_takes_the_place_of_a_broker_whose_folder_is_gone(
    cluster: Cluster, spare: Spare, tmp_path: Path
) -> None:
    """The follower is killed while it copies. What it had when the broker died is served, and each
    key goes on in its order.
    """
    await cluster.create(SUBJECT, partitions=3)
    await send(cluster.meta, 0, 2_000)
    for turn in range(1, 4):
        spare.start()
        await send(cluster.meta, 2_000 * turn, 2_000)
        await asyncio.to_thread(spare.kill)
    spare.start()
    folder = tmp_path / "broker-1"
    await eventually(lambda: spare.folder.joinpath("log").exists(), seconds=30)
    await eventually(lambda: is_copy_of(folder, spare.folder), seconds=60)

    await asyncio.to_thread(cluster.brokers[0].kill)
    shutil.rmtree(folder)
    await asyncio.to_thread(spare.kill)
    files = make_files(str(spare.folder))
    files.lock()
    promote_candidate(files, read_candidate(files))
    files.close()
    promoted = BrokerProcess(spare.folder, "--meta", cluster.meta, "--host", "127.0.0.2")
    await asyncio.to_thread(promoted.start)
    try:
        await send(cluster.meta, 8_000, 100)
        async with Reader(cluster.meta, SUBJECT) as reader:
            read = [int(message.value) async for message in reader]
    finally:
        await asyncio.to_thread(promoted.end)
    assert sorted(read) == list(range(8_100))
    for key in range(7):
        own = [number for number in read if number % 7 == key]
        assert own == sorted(own)


async def test_broker_does_not_serve_a_copy(cluster: Cluster, spare: Spare) -> None:
    await cluster.create(SUBJECT)
    spare.start()
    await eventually((spare.folder / "copy.json").exists, seconds=30)
    await asyncio.to_thread(spare.kill)
    refusal = await asyncio.to_thread(BrokerProcess(spare.folder).refused)
    assert "keylane broker promote" in refusal


async def test_follower_refuses_a_folder_that_is_no_copy(cluster: Cluster, tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "notes.txt").write_text("keep")
    refusal = await asyncio.to_thread(
        BrokerProcess(folder, "--meta", cluster.meta, "--follow", "true").refused
    )
    assert "is not a copy" in refusal
    assert (folder / "notes.txt").read_text() == "keep"


async def test_second_follower_is_refused_a_folder_that_is_in_use(
    cluster: Cluster, spare: Spare
) -> None:
    await cluster.create(SUBJECT)
    spare.start()
    await eventually((spare.folder / "copy.json").exists, seconds=30)
    second = BrokerProcess(spare.folder, "--meta", cluster.meta, "--follow", "true")
    assert "another broker is using the data folder" in await asyncio.to_thread(second.refused)
