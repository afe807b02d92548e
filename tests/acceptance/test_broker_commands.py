"""The broker's commands by their command lines: what a folder holds, what is wrong with it, how a
broker is.
"""

from __future__ import annotations

import asyncio
import json
import random
import subprocess
from pathlib import Path

import pytest

from keylane.broker.storage.data_folder import claim_folder
from keylane.broker.storage.files import RealFiles
from keylane.broker.storage.log.commit_log import segment_path
from keylane.protocol.batch import encode_batch
from keylane.protocol.message import pack_properties
from keylane.protocol.record import Compression
from sim.machines.clock import ManualClock
from sim.machines.store import Desk, batch, open_store
from support.brokers.broker_process import BrokerProcess
from support.server_process import run_keylane

pytestmark = pytest.mark.acceptance


def keylane(*arguments: str) -> subprocess.CompletedProcess[str]:
    return run_keylane("broker", *arguments)


@pytest.fixture
def folder(tmp_path) -> Path:
    """A data folder with two partitions, a consumer group and 40 batches, stopped cleanly."""
    files = RealFiles(tmp_path / "data")
    files.lock()
    claim_folder(files, broker_group="g1", rng=random.Random(1))

    async def fill() -> None:
        clock = ManualClock()
        desk = Desk(open_store(files, clock=clock, segment_bytes=4096), clock)
        for number in (1, 2):
            await desk.host(number)
        await desk.acquire(3)
        for number in range(20):
            for partition_id in (1, 2):
                data = batch(sequence=2 * number, partition_id=partition_id)
                await desk.append(data, partition_id)
        await desk.ack(3, (0, 3), (5, 6))
        _, durable = desk.store.seal(2)
        await durable
        await desk.store.close()

    asyncio.run(fill())
    files.close()
    return tmp_path / "data"


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_verify_counts_a_folder_without_damage(folder):
    """A folder without damage is counted, with status 0, and not touched."""
    before = contents(folder)
    done = keylane("verify", str(folder), "-o", "json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert (report["batches"], report["messages"], report["partitions"]) == (40, 80, 2)
    assert report["problems"] == report["stopped_partitions"] == []
    assert contents(folder) == before
    assert "nothing is wrong" in keylane("verify", str(folder)).stdout


def test_verify_names_the_damage_of_a_folder(folder):
    """Damage is named by position, partition and offsets, with status 1; nothing is repaired on the
    way.
    """
    path = folder / segment_path(0)
    data = bytearray(path.read_bytes())
    data[1500] ^= 1
    path.chmod(0o644)
    path.write_bytes(data)
    before = contents(folder)
    done = keylane("verify", str(folder), "-o", "json")
    assert done.returncode == 1
    report = json.loads(done.stdout)
    assert report["stopped_partitions"] == [1]
    assert "positions [" in report["problems"][0]
    assert "partition 1 has lost its offsets from" in report["problems"][1]
    assert "stopped partitions: 1" in keylane("verify", str(folder)).stdout
    assert "DAMAGE" in keylane("dump", str(folder)).stdout
    assert contents(folder) == before


def test_dump_prints_records_by_position_or_offset(folder):
    """Records are printed one a line, by position or by offset of one partition, as many as asked
    for.
    """
    lines = keylane("dump", str(folder), "--limit", "1000").stdout.splitlines()
    kinds = [line.split()[1] for line in lines]
    assert kinds.count("MESSAGES") == 40
    assert {"PARTITION", "FENCE", "CURSOR", "SEAL"} < set(kinds)
    done = keylane(
        "dump",
        str(folder),
        "--partition",
        "2",
        "--from",
        "31",
        "--limit",
        "4",
        "--messages",
        "-o",
        "json",
    )
    records = [json.loads(line) for line in done.stdout.splitlines()]
    assert [record["kind"] for record in records] == ["PARTITION", "TOLD", "MESSAGES", "MESSAGES"]
    assert [record.get("base_offset") for record in records] == [None, None, 30, 32]
    assert records[2]["messages"][1] == {"key": "k31", "value": "value 31"}
    position = records[2]["position"]
    done = keylane("dump", str(folder), "--from", str(position), "--limit", "1", "--messages")
    assert "'k31': 'value 31'" in done.stdout


def fill_folder(data: Path, **batch: object) -> None:
    """A data folder with one batch in one partition, stopped cleanly."""
    files = RealFiles(data)
    files.lock()
    claim_folder(files, broker_group="g1", rng=random.Random(1))

    async def fill() -> None:
        desk = Desk(open_store(files, clock=ManualClock()), ManualClock())
        await desk.host(1)
        session = {"producer_id": 1, "producer_epoch": 0, "sequence": 0}
        await desk.append(encode_batch(partition_id=1, **session, **batch), 1)
        await desk.store.close()

    asyncio.run(fill())
    files.close()


def dumped_batch(data: Path) -> dict[str, object]:
    """The one batch of a folder, as `keylane broker dump` shows it."""
    done = keylane("dump", str(data), "--messages", "-o", "json")
    records = map(json.loads, done.stdout.splitlines())
    (batch,) = [record for record in records if record["kind"] == "MESSAGES"]
    return batch


def test_dump_shows_properties_beside_key_and_value(tmp_path):
    """Properties are shown beside key and value; bytes that are none do not stop the dump."""
    fill_folder(
        tmp_path / "data",
        sent_at_ns=[1, 2, 3],
        keys=[b"a", b"b", b"c"],
        values=[b"x", b"y", b"z"],
        properties=[pack_properties({"from": "JFK"}), b"", b"no properties"],
    )
    dumped = dumped_batch(tmp_path / "data")
    assert dumped["messages"] == [
        {"key": "a", "value": "x", "properties": {"from": "JFK"}},
        {"key": "b", "value": "y"},
        {"key": "c", "value": "z", "properties": "no properties"},
    ]
    assert (
        "'a': 'x'  {'from': 'JFK'}" in keylane("dump", str(tmp_path / "data"), "--messages").stdout
    )


@pytest.mark.parametrize("compression", [Compression.ZSTD, Compression.LZ4])
def test_packed_batches_are_dumped_and_verified_as_others(tmp_path, compression):
    """The folder is read without the broker: its messages are shown unpacked."""
    values = ["value " * 9 + str(number) for number in range(9)]
    fill_folder(
        tmp_path / "data",
        sent_at_ns=[1] * 9,
        keys=[b"a"] * 9,
        values=[value.encode() for value in values],
        compression=compression,
    )
    dumped = dumped_batch(tmp_path / "data")
    assert dumped["compression"] == compression.name
    assert dumped["messages"] == [{"key": "a", "value": value} for value in values]
    assert keylane("verify", str(tmp_path / "data")).returncode == 0


def test_broker_commands_refuse_what_is_no_data_folder(tmp_path, folder):
    """A folder that is missing, or no broker's, or in use is refused and nothing is made."""
    missing = tmp_path / "nowhere"
    for command in ("verify", "dump"):
        done = keylane(command, str(missing))
        assert done.returncode == 1
        assert "not a broker's data folder" in done.stderr
        assert not missing.exists()
    process = BrokerProcess(folder).start()
    try:
        for command in ("verify", "dump", "index verify"):
            refused = keylane(*command.split(), str(folder))
            assert refused.returncode == 1
            assert "a broker or a follower is using the data folder" in refused.stderr
            assert "stop it first" in refused.stderr
            assert "keylane broker health" in refused.stderr
        done = keylane("health", process.address, "-o", "json")
        assert done.returncode == 1  # it has no metaserver, so no client finds it
        health = json.loads(done.stdout)
        assert not health["ready"]
        assert health["details"]["durable"] == "fsync"
        assert health["details"]["damage"] == []
        table = keylane("health", process.address).stdout
        assert "not ready" in table
        assert not any(word in table for word in ("None", "True", "False", "[", "{"))
    finally:
        process.end()
    assert keylane("health", process.address).returncode == 1
