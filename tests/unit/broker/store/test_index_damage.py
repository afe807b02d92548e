"""A damaged index, of either kind: reads say so, health does, and the next start makes it anew;
nothing else destroys it.
"""

from __future__ import annotations

import gc
from pathlib import Path

import pytest

from keylane.broker.storage.files import RealFiles
from keylane.broker.storage.index import rocksdb_tables
from keylane.broker.storage.index.rocksdb import RocksConsumeQueues
from keylane.protocol.control import TimeBound
from keylane.protocol.errors import (
    CorruptIndexError,
    DataFolderError,
    DiskFullError,
    StorageError,
)
from sim.machines.clock import ManualClock
from sim.machines.store import Desk, batch, open_store
from support.indexes import KINDS

BATCHES = 300


async def started(files, kind):
    """As another process: without what errors of the one before keep alive in cycles."""
    gc.collect()
    clock = ManualClock()
    store = open_store(files, clock=clock, index=kind, cache_bytes=0)
    return Desk(store, clock)


async def filled(root: Path, kind: str) -> RealFiles:
    files = RealFiles(root)
    files.lock()
    desk = await started(files, kind)
    await desk.host()
    for number in range(BATCHES):
        await desk.append(batch(sequence=2 * number))
    await desk.store.close()
    return files


def damage(root: Path, kind: str) -> None:
    """One bit of a unit; of RocksDB, of the table that has the units."""
    if kind == "file":
        (path,) = (root / "index").glob("*.blocks")
    else:
        path = max((root / "rocksdb").glob("*.sst"), key=lambda file: file.stat().st_size)
    data = bytearray(path.read_bytes())
    data[100] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("kind", KINDS)
async def test_flipped_bit_is_reported_and_gone_after_the_next_start(kind, tmp_path):
    """A read that meets it is told so, and health too; after the next start everything is there,
    and nothing is told.
    """
    files = await filled(tmp_path, kind)
    damage(tmp_path, kind)
    desk = await started(files, kind)
    with pytest.raises(CorruptIndexError):
        await desk.read(0)
    with pytest.raises(CorruptIndexError):
        await desk.store.find_offset_at(desk.store.state.partition(1), 0, TimeBound.LOWER)
    (problem,) = desk.store.state.problems
    assert "index" in problem
    assert "next start" in problem
    await desk.append(batch(sequence=2 * BATCHES))
    await desk.store.close()
    desk = await started(files, kind)
    assert desk.store.state.problems == []
    offset = 0
    while offset < 2 * BATCHES + 2:
        offset = (await desk.read(offset))[0].upto
    await desk.store.close()


@pytest.mark.parametrize("kind", KINDS)
async def test_damage_met_by_a_start(kind, tmp_path):
    """A start that needs what is damaged, to mend first offsets, makes the index anew at once."""
    files = await filled(tmp_path, kind)
    damage(tmp_path, kind)
    queues = (await started(files, kind)).store.queues
    with pytest.raises(CorruptIndexError):
        list(queues.first_offsets_at(5000))
    queues.close()
    for name in files.list("snapshot"):
        files.remove(f"snapshot/{name}")
    desk = await started(files, kind)
    offset = 0
    while offset < 2 * BATCHES:
        offset = (await desk.read(offset))[0].upto
    await desk.store.close()


@pytest.mark.parametrize(
    ("said", "kind"),
    [
        ("IO error: While open a file for random read: x.sst: Permission denied", StorageError),
        ("IO error: While open a file for random read: x.sst: Too many open files", StorageError),
        ("IO error: No space left on device: While appending to file: 1.sst", DiskFullError),
        ("IO error: While lock file: LOCK: Resource temporarily unavailable", StorageError),
    ],
)
async def test_only_damage_destroys(said, kind, tmp_path, monkeypatch):
    """A database that cannot be opened for another reason is refused, and is there when the reason
    is gone.
    """
    files = await filled(tmp_path, "rocksdb")
    path = str(tmp_path / "rocksdb")
    with monkeypatch.context() as patched:

        def fails(*_args, **_kwargs):
            raise Exception(said)  # as the library does

        patched.setattr(rocksdb_tables, "Rdict", type("Refusing", (), {"__new__": fails}))
        with pytest.raises(kind) as raised:
            RocksConsumeQueues(path)
        assert not isinstance(raised.value, CorruptIndexError)
    queues = RocksConsumeQueues(path)
    assert queues.bounds(1) == (0, 2 * BATCHES)
    queues.close()
    files.close()


async def test_newer_database_is_refused(tmp_path):
    """A database of a newer format is left as it is, and the broker says so."""
    queues = RocksConsumeQueues(str(tmp_path / "rocksdb"))
    queues._tables._bounds.put(b"format", (2).to_bytes(4, "little"))
    queues.close()
    for _ in range(2):
        with pytest.raises(DataFolderError, match="format 2"):
            RocksConsumeQueues(str(tmp_path / "rocksdb"))
