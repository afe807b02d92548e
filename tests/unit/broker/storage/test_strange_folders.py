"""Folders that are not as a broker left them: refused in clear words, with nothing changed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from keylane.broker.control import BrokerControl
from keylane.broker.storage.files import RealFiles
from keylane.broker.storage.log.commit_log import CommitLog, segment_path
from keylane.protocol.errors import CorruptLogError, DataFolderError, DiskFullError, StorageError
from keylane.testing.machines.disk import SimDisk
from sim.machines.clock import ManualClock
from sim.machines.store import Desk, batch, facts, open_store


def control_of(desk: Desk) -> BrokerControl:
    return BrokerControl(
        desk.store, broker_group="g1", broker_id="x", clock=desk.clock, registration=lambda: ""
    )


async def filled(disk: SimDisk) -> SimDisk:
    clock = ManualClock()
    desk = Desk(open_store(disk, clock=clock), clock)
    await desk.host()
    for number in range(5):
        await desk.append(batch(sequence=2 * number))
    await desk.store.close()
    return disk


def log_of(disk: SimDisk) -> dict[str, bytes]:
    return {
        name: bytes(file.data) for name, file in disk.contents.items() if name.startswith("log/")
    }


@pytest.mark.parametrize("text", [b"", b"years of work\n" * 100])
@pytest.mark.parametrize("snapshot", [True, False])
async def test_segment_that_the_log_never_reached_is_refused(text, snapshot):
    """A file with a segment's name far behind the log's end is no part of it: the start is refused,
    the file kept.
    """
    disk = await filled(SimDisk())
    path = segment_path(99_999_999)
    disk.open_append(path).append([text])
    if not snapshot:
        for name in disk.list("snapshot"):
            disk.remove(f"snapshot/{name}")
    before = log_of(disk)
    with pytest.raises(DataFolderError, match=r"99999999\.log does not belong to the log"):
        open_store(disk)
    assert log_of(disk) == before


async def test_log_that_is_gone_is_missed():
    """A snapshot without its log is no beginning: the start is refused, so that nothing is appended
    beside it.
    """
    disk = await filled(SimDisk())
    for name in disk.list("log"):
        disk.remove(f"log/{name}")
    with pytest.raises(DataFolderError, match="log has no segments"):
        open_store(disk)
    assert disk.list("log") == []


def test_position_before_the_log_is_a_typed_error():
    """Nothing is read at a negative place of a file."""
    log = CommitLog(SimDisk(), segment_bytes=1000, bases=[500], end=600)
    with pytest.raises(CorruptLogError, match="begins at position 500"):
        log.read(100, 10)


@pytest.mark.parametrize(("name", "index"), [("rocksdb", "rocksdb"), ("log", "file")])
def test_file_in_a_folders_place_is_named(name, index, tmp_path):
    """A file where a folder has to be is refused by its name, and kept."""
    files = RealFiles(tmp_path / "data")
    files.lock()
    (tmp_path / "data" / name).write_bytes(b"mine")
    with pytest.raises(DataFolderError, match=f"{name} is not a folder"):
        open_store(files, index=index)
    files.close()
    assert (tmp_path / "data" / name).read_bytes() == b"mine"


def test_folders_above_are_durable(tmp_path, monkeypatch):
    """Each folder that is made for the data is made durable in the one above it."""
    synced: list[str] = []
    fsync = os.fsync

    def watched(descriptor: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", watched)
    files = RealFiles(tmp_path / "a" / "b" / "c")
    files.lock()
    files.close()
    assert synced == [str(tmp_path), str(tmp_path / "a"), str(tmp_path / "a" / "b")]


async def test_snapshot_that_fails_is_told_in_health():
    """While no snapshot can be written, health says why, and that retention waits for it; the
    broker stays ready.
    """
    disk, clock = SimDisk(), ManualClock()
    desk = Desk(open_store(disk, clock=clock), clock)
    await desk.host()
    control = control_of(desk)

    def refuse(_position: int) -> None:
        raise StorageError("a block is lost")

    checkpoint = desk.store.queues.checkpoint
    desk.store.queues.checkpoint = refuse
    assert not await desk.store.snapshotter.write()
    health = await control.health(None, {})
    assert health.ready
    assert health.reason == "no snapshot, and so no retention: a block is lost"
    assert health.details["snapshot"] == "a block is lost"
    desk.store.queues.checkpoint = checkpoint
    assert await desk.store.snapshotter.write()
    health = await control.health(None, {})
    assert (health.reason, health.details["snapshot"]) == ("", "written when it is due")


async def test_sealed_segment_may_be_the_last_again():
    """When the segments behind a sealed one are lost with their trails, the log continues in that
    segment, for any user.
    """
    disk, clock = SimDisk(), ManualClock()
    desk = Desk(open_store(disk, clock=clock, segment_bytes=4_096), clock)
    await desk.host()
    for number in range(60):
        await desk.append(batch(sequence=2 * number))
    assert disk.protected
    for name in disk.list("log"):
        if int(name.partition(".")[0]):
            disk.remove(f"log/{name}")
    again = Desk(open_store(disk, clock=clock), clock)
    await again.host(2)
    await again.append(batch(partition_id=2), 2)


def test_write_that_the_machine_takes_in_pieces_is_whole(tmp_path, monkeypatch):
    """Short writes are gone on with, across the borders of buffers, until every byte is in the
    file.
    """
    pwritev = os.pwritev

    def short(descriptor: int, buffers: list[bytes], position: int) -> int:
        whole = b"".join(bytes(buffer) for buffer in buffers)
        return pwritev(descriptor, [whole[:7]], position)

    monkeypatch.setattr(os, "pwritev", short)
    files = RealFiles(tmp_path)
    buffers = [bytes([n]) * n for n in range(1, 40)]
    file = files.open_append("x")
    file.append(buffers)
    file.append([b"end"])
    file.close()
    assert (tmp_path / "x").read_bytes() == b"".join(buffers) + b"end"


async def test_list_of_partitions_is_right_after_one_was_taken_back():
    """A partition whose record met a full disk is not listed, and one that comes in its place
    is.
    """
    disk, clock = SimDisk(), ManualClock()
    desk = Desk(open_store(disk, clock=clock), clock)
    await desk.host()
    control = control_of(desk)

    async def listed() -> list[int]:
        return [status.partition_id for status in (await control.list(None, {})).partitions]

    disk.free_space = 10
    _, durable = desk.store.host(facts(9))
    assert await listed() == [1]
    with pytest.raises(DiskFullError):
        await durable
    disk.free_space = None
    clock.advance(2_000)
    await desk.host(10)
    assert await listed() == [1, 10]


def test_name_of_a_folder_is_synced_when_the_process_that_made_it_was_killed_before_its_sync(
    tmp_path: Path,
):
    """Else the folder, and all that is stored in it later, may be gone after a power cut."""

    class EndedBeforeSyncError(Exception):
        pass

    class UnsyncedFiles(RealFiles):
        def sync_folder(self, path: str = "") -> None:
            raise EndedBeforeSyncError(path)

    class NotingFiles(RealFiles):
        def sync_folder(self, path: str = "") -> None:
            synced.append(path)
            super().sync_folder(path)

    synced: list[str] = []
    with pytest.raises(EndedBeforeSyncError):
        UnsyncedFiles(tmp_path).make_folder("log")
    NotingFiles(tmp_path).make_folder("log")
    assert synced == [""]
