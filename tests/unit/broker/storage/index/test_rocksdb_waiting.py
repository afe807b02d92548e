"""A RocksDB index on a full disk: messages are refused until there is room, and nothing that was
acked is lost or doubled.
"""

from __future__ import annotations

import contextlib
import os
import random
import subprocess
from pathlib import Path

import pytest

from keylane.broker.storage.files import RealFiles
from keylane.broker.storage.index import rocksdb_tables
from keylane.broker.storage.index.interface import Unit
from keylane.broker.storage.index.rocksdb import RocksConsumeQueues
from keylane.broker.store.group_commit import RETRY_FULL_MS
from keylane.protocol.control import TimeBound
from keylane.protocol.errors import BrokerReadOnlyError, DiskFullError, StorageError
from sim.machines.clock import ManualClock
from sim.machines.store import Desk, batch, open_store

FULL = "IO error: No space left on device: While appending to file: 000004.log"
ALL = 1 << 60


@pytest.fixture
def no_room(monkeypatch):
    """Makes the database's writes fail as on a full disk, or succeed again."""
    real = rocksdb_tables.RocksTables.write
    full = [False]

    def write(tables, batch):
        if full[0]:
            tables.needs_reopen = True
            raise Exception(FULL)  # as the library does
        real(tables, batch)

    monkeypatch.setattr(rocksdb_tables.RocksTables, "write", write)
    monkeypatch.setattr(rocksdb_tables, "REOPEN_BYTES", 0)
    return lambda on: full.__setitem__(0, on)


def unit(number: int) -> Unit:
    return Unit(2 * number, 2, 100 * number, 100, 1000 + number)


def test_units_that_wait_are_found(no_room, tmp_path):
    """What the index has no room for is found as if it were there, by offset and by time, and
    written later.
    """
    queues = RocksConsumeQueues(str(tmp_path / "rocksdb"))
    for number in range(5):
        queues.dispatch([(1, unit(number))])
    no_room(True)
    for number in range(5, 10):
        with pytest.raises(DiskFullError):
            queues.dispatch(
                [(1, unit(number)), (2, unit(number)._replace(base_offset=number - 5))]
                if number == 5
                else [(1, unit(number))]
            )
    with pytest.raises(DiskFullError):
        queues.checkpoint(1000)

    def agrees() -> None:
        assert queues.bounds(1) == (0, 20)
        assert queues.bounds(2) == (0, 2)
        assert queues.partitions() == [1, 2]
        whole = [unit(number) for number in range(10)]
        assert queues.find(1, 0, end=20, bytes_max=ALL) == whole
        assert queues.find(1, 7, end=20, bytes_max=400) == whole[3:7]
        assert queues.find(1, 15, end=17, bytes_max=ALL) == whole[7:9]
        assert queues.find(1, 20, end=22, bytes_max=ALL) == []
        for number in range(10):
            for bound in TimeBound:
                assert queues.find_by_time(1, 1000 + number, bound) == whole[number]
        assert queues.find_by_time(1, 1010, TimeBound.LOWER) is None
        assert queues.find_by_time(1, 999, TimeBound.UPPER) is None

    agrees()
    assert queues.position == 500
    no_room(False)
    queues.dispatch([(3, unit(10)._replace(base_offset=0))])
    agrees_ids = queues.partitions()
    assert agrees_ids == [1, 2, 3]
    assert queues.position == 1100
    queues.checkpoint(1100)
    queues.close()
    queues = RocksConsumeQueues(str(tmp_path / "rocksdb"))
    assert queues.find(1, 0, end=20, bytes_max=ALL) == [unit(number) for number in range(10)]
    queues.close()


async def all_there(desk: Desk, count: int) -> None:
    offset = 0
    while offset < count:
        answer, _ = await desk.read(offset)
        assert answer.upto > offset
        assert answer.next_offset == count
        offset = answer.upto


@pytest.mark.parametrize("killed", [False, True])
async def test_full_index_refuses_and_heals(no_room, tmp_path, killed):
    """The commit that met the full index is acked, for the log has it; later ones are refused until
    there is room.
    """
    clock = ManualClock()
    files = RealFiles(tmp_path)
    desk = Desk(open_store(files, clock=clock, index="rocksdb", cache_bytes=0), clock)
    await desk.host()
    await desk.append(batch(sequence=0))
    no_room(True)
    assert (await desk.append(batch(sequence=2))).base_offset == 2
    assert desk.store.commit.refusal_reason == "the disk is full"
    with pytest.raises(BrokerReadOnlyError):
        await desk.append(batch(sequence=4))
    await all_there(desk, 4)
    no_room(False)
    if killed:  # what waited is lost with the process, and the log has it
        desk.store.queues.close()
        desk = Desk(open_store(files, clock=clock, index="rocksdb", cache_bytes=0), clock)
    clock.advance(RETRY_FULL_MS)
    assert desk.store.commit.refusal_reason == ""
    assert (await desk.append(batch(sequence=2))).duplicate
    assert (await desk.append(batch(sequence=4))).base_offset == 4
    await all_there(desk, 6)
    await desk.store.close()


@contextlib.contextmanager
def small_disk(folder: Path):
    """A disk of 4 MiB, or None where this user may mount none."""
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=4m", "none", str(folder)]
    try:
        mounted = subprocess.run(mount, capture_output=True, check=False).returncode == 0
    except OSError:
        mounted = False
    try:
        yield folder if mounted else None
    finally:
        if mounted:
            subprocess.run(["umount", "-l", str(folder)], check=True)


def free(folder: Path) -> int:
    disk = os.statvfs(folder)
    return disk.f_bavail * disk.f_frsize


async def test_small_disk_that_others_fill(no_room, tmp_path):
    """On a real disk that fills the broker refuses, and takes messages again once there is room;
    nothing acked is lost.
    """
    clock, rng = ManualClock(), random.Random(1)
    with small_disk(tmp_path / "disk") as disk:
        folder = disk or tmp_path
        files = RealFiles(folder / "data")
        files.lock()
        desk = Desk(open_store(files, clock=clock, index="rocksdb", cache_bytes=0), clock)
        await desk.host()
        padding = folder / "padding"
        if disk:
            padding.write_bytes(bytes(max(0, free(disk) - 300_000)))
        acked = refused = 0
        while refused < 3 and acked < 4000:
            if not disk and acked == 100:
                no_room(True)
            try:
                await desk.append(batch(sequence=2 * acked, value=rng.randbytes(10).hex().encode()))
                acked += 1
            except (StorageError, BrokerReadOnlyError):
                refused += 1
                clock.advance(RETRY_FULL_MS)
        assert refused == 3
        await all_there(desk, 2 * acked)
        padding.unlink(missing_ok=True)
        no_room(False)
        clock.advance(RETRY_FULL_MS)
        for number in range(acked, acked + 100):
            answer = await desk.append(batch(sequence=2 * number))
            assert answer.base_offset == 2 * number
        await all_there(desk, 2 * acked + 200)
        await desk.store.close()
        files.close()
