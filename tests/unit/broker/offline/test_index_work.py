"""Indexes rebuilt, converted and compared while no broker runs, and brokers that are started with
the other one.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from keylane.broker.offline.index_work import rebuild_index, switch_index, verify_indexes
from keylane.broker.storage.data_folder import claim_folder
from keylane.broker.storage.files import RealFiles
from keylane.broker.storage.index.file import FileConsumeQueues
from keylane.broker.storage.index.interface import Unit
from keylane.broker.storage.index.kinds import has_index, open_index
from keylane.protocol.errors import DataFolderError, InvalidRequestError
from keylane.testing.machines.disk import SimDisk
from sim.machines.clock import ManualClock
from sim.machines.store import Desk, batch, open_store
from support.indexes import KINDS

OTHER = {"file": "rocksdb", "rocksdb": "file"}
BATCHES = 300


@pytest.fixture(params=KINDS)
async def folder(request, tmp_path):
    """The folder of a broker that was stopped, and its index's kind."""
    files = RealFiles(tmp_path)
    files.lock()
    claim_folder(files, broker_group="g1", rng=random.Random(1))
    await fill(files, request.param, 0)
    yield files, request.param
    files.close()


async def fill(files, kind, start):
    clock = ManualClock()
    store = open_store(files, clock=clock, index=kind, segment_bytes=8192)
    desk = Desk(store, clock)
    for number in (1, 2):
        await desk.host(number)
    for number in range(start, start + BATCHES):
        clock.advance(1)
        await desk.append(
            batch(partition_id=1 + number % 2, sequence=number // 2 * 2), 1 + number % 2
        )
    await store.close()
    return store


async def read_all(files, kind):
    store = open_store(files, index=kind, cache_bytes=0)
    partition = store.state.partition(1)
    offset = 0
    while offset < partition.readable_offset:
        _, offset = await store.read(partition, offset, bytes_max=2000)
    end = partition.readable_offset
    await store.close()
    return end


async def test_stopped_broker_is_whole(folder):
    """What a clean stop leaves agrees with the log, to the last batch."""
    files, kind = folder
    (report,) = verify_indexes(files)
    assert (report.index, report.partitions, report.batches) == (kind, 2, BATCHES)
    assert not report.problems


async def test_rebuilt_index_is_the_same(folder):
    """From the log alone comes the index that was there."""
    files, kind = folder
    (before,) = verify_indexes(files)
    assert rebuild_index(files, kind) == before
    assert await read_all(files, kind) == BATCHES


async def test_index_is_switched_to_the_other_kind_and_back(folder):
    """The other index has every batch of the first, which is gone then; back again too."""
    files, kind = folder
    report = switch_index(files, OTHER[kind])
    assert (report.index, report.batches) == (OTHER[kind], BATCHES)
    assert not has_index(files, kind)
    (verified,) = verify_indexes(files)
    assert verified.problems == []
    assert verified == report
    assert await read_all(files, OTHER[kind]) == BATCHES
    with pytest.raises(InvalidRequestError):
        switch_index(files, OTHER[kind])
    assert switch_index(files, kind).batches == BATCHES


async def test_switch_tells_how_many_offsets_are_done(folder):
    """The number only grows, up to all that the partitions have."""
    files, kind = folder
    told = []
    switch_index(files, OTHER[kind], lambda done, total: told.append((done, total)))
    queues = open_index(files, OTHER[kind])
    bounds = [queues.bounds(partition_id) for partition_id in queues.partitions()]
    queues.close()
    offsets = sum(end - start for start, end in bounds)
    assert len(told) > 1
    assert told == sorted(told)
    assert told[0][0] > 0
    assert told[-1] == (offsets, offsets)


async def test_both_are_compared(folder):
    """Two indexes of one log agree; one that lacks or invents something is told."""
    files, kind = folder
    rebuild_index(files, OTHER[kind])
    assert [report.problems for report in verify_indexes(files)] == [[], []]
    queues = open_index(files, kind)
    (unit,) = queues.find(1, 298, end=299, bytes_max=1)
    queues.truncate(unit.position)
    queues.dispatch([(1, unit._replace(position=unit.position - 1))])
    queues.checkpoint(unit.end_position + 1000)
    queues.close()
    wrong = {report.index: report.problems for report in verify_indexes(files)}
    assert any("offset" in text or "log has" in text for text in wrong[kind])


async def test_broker_may_be_started_with_the_other_index(folder):
    """The other index is made at start, the one left behind is not trusted again."""
    files, kind = folder
    await fill(files, OTHER[kind], BATCHES)
    assert not has_index(files, kind)
    assert await read_all(files, kind) == 2 * BATCHES
    assert await read_all(files, OTHER[kind]) == 2 * BATCHES


async def test_unfinished_index_is_made_again(folder):
    """An index whose making was cut short is not used."""
    files, kind = folder
    (Path(files.name()) / f"unfinished-{kind}").touch()
    (report,) = verify_indexes(files)
    assert "incomplete" in report.problems[0]
    assert await read_all(files, kind) == BATCHES
    (report,) = verify_indexes(files)
    assert report.problems == []


async def test_deleted_index_is_made_again(folder):
    """An index of which nothing is left comes back from the log."""
    files, kind = folder
    for name in files.list("index" if kind == "file" else "rocksdb"):
        files.remove(f"{'index' if kind == 'file' else 'rocksdb'}/{name}")
    assert await read_all(files, kind) == BATCHES


def contents(files, kind):
    root = Path(files.name()) / ("index" if kind == "file" else "rocksdb")
    return {path.name: (path.stat().st_mtime_ns, path.read_bytes()) for path in root.iterdir()}


@pytest.mark.parametrize("what", ["nothing", "head", "half", "units"])
async def test_verify_changes_nothing(folder, what):
    """A whole or a damaged index is byte for byte as it was, and damage is told."""
    files, kind = folder
    root = Path(files.name())
    name = {
        "file": {"head": "index/journal-*", "half": "index/journal-*", "units": "index/*.blocks"},
        "rocksdb": {
            "head": "rocksdb/MANIFEST*",
            "half": "rocksdb/MANIFEST*",
            "units": "rocksdb/*.sst",
        },
    }[kind].get(what)
    if name is not None:
        path = max(root.glob(name), key=lambda file: file.stat().st_size)
        data = bytearray(path.read_bytes())
        data[60] ^= 0xFF
        path.write_bytes(data[: len(data) // 2] if what == "half" else data)
    before = contents(files, kind)
    (report,) = verify_indexes(files)
    assert bool(report.problems) == (name is not None)
    assert contents(files, kind) == before


async def test_no_index_at_all_is_told(folder):
    """A folder without an index does not pass."""
    files, kind = folder
    for name in contents(files, kind):
        files.remove(f"{'index' if kind == 'file' else 'rocksdb'}/{name}")
    (report,) = verify_indexes(files)
    assert "no index" in report.problems[0]


def test_newer_journal_is_refused():
    """A whole frame of a later format is left as it is, and the broker says so; a damaged magic is
    damage.
    """
    disk = SimDisk()
    queues = FileConsumeQueues(disk)
    queues.recover(0)
    queues.dispatch([(1, Unit(0, 1, 0, 100, 1000))])
    queues.close()
    journal = disk.contents["index/journal-0000000001"]
    journal.data[3] = ord("2")
    before = bytes(journal.data)
    with pytest.raises(DataFolderError, match="format 2"):
        FileConsumeQueues(disk)
    assert bytes(journal.data) == before
    journal.data[20] ^= 1
    assert FileConsumeQueues(disk).recover(100) == 0
