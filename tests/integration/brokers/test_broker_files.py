"""The real disk and the simulated one keep one contract; a data folder belongs to one broker."""

from __future__ import annotations

import asyncio
import errno
import os
import random
import stat
import threading
from pathlib import Path

import pytest

from keylane.broker.app import run_follower
from keylane.broker.settings import BrokerSettings
from keylane.broker.storage import files as files_module
from keylane.broker.storage.copy_file import CopyFile, write_copy_file
from keylane.broker.storage.data_folder import claim_folder, read_identity
from keylane.broker.storage.files import Files, RealFiles, replace_file
from keylane.protocol.errors import (
    DataFolderError,
    DiskFullError,
    Reason,
    StorageError,
)
from keylane.testing.machines.disk import SimDisk
from support.raising import raises


@pytest.fixture(params=["real", "simulated"])
def disk(request, tmp_path):
    files: Files = RealFiles(tmp_path / "data") if request.param == "real" else SimDisk()
    files.lock()
    yield files
    files.close()


def test_file_is_appended_to_when_opened_again(disk):
    """Many buffers are written one after another, and a file opened again is appended to at its
    end.
    """
    disk.make_folder("log")
    pieces = [b"%d," % number for number in range(3000)]
    file = disk.open_append("log/a")
    file.append(pieces[:2500])
    file.fdatasync()
    file.close()
    file = disk.open_append("log/a")
    file.append([memoryview(bytearray(piece)) for piece in pieces[2500:]])
    whole = b"".join(pieces)

    assert file.size == disk.size("log/a") == len(whole)
    assert disk.pread("log/a", 0, 1 << 20) == whole
    assert disk.pread("log/a", 10, 5) == whole[10:15]
    assert disk.pread("log/a", len(whole) + 5, 5) == b""
    file.truncate(7)
    file.append([b"end"])
    file.close()
    assert disk.pread("log/a", 0, 100) == whole[:7] + b"end"


def test_reserved_bytes_are_zeros_that_appends_overwrite(disk):
    """The file is longer, its end stays where it is, and a cut takes them away."""
    if isinstance(disk, SimDisk):
        disk.reserves = True
    file = disk.open_append("a")
    file.append([b"one"])
    assert (file.size, file.reserved) == (3, 0)
    file.reserve(5_000)
    file.reserve(4_000)
    assert (file.size, file.reserved, disk.size("a")) == (3, 5_000, 5_003)
    file.append([b"two"])
    file.fdatasync()
    assert (file.size, file.reserved, disk.size("a")) == (6, 4_997, 5_003)
    assert disk.pread("a", 0, 10) == b"onetwo\0\0\0\0"
    file.append([bytes(6_000)])
    assert (file.size, file.reserved, disk.size("a")) == (6_006, 0, 6_006)
    file.reserve(10)
    file.truncate(6)
    assert (file.size, file.reserved, disk.size("a")) == (6, 0, 6)
    file.close()
    assert disk.open_append("a").size == 6


def test_reserved_bytes_are_known_when_the_disk_had_a_part_of_them(tmp_path, monkeypatch):
    """A full disk may give a part before it refuses: the file is longer, and a cut takes the part
    away.
    """
    files = RealFiles(tmp_path)
    file = files.open_append("a")
    file.append([b"one"])

    def allocate(descriptor: int, start: int, _length: int) -> None:
        os.ftruncate(descriptor, start + 4_096)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", allocate)
    with pytest.raises(DiskFullError):
        file.reserve(1 << 20)
    assert (file.size, file.reserved, files.size("a")) == (3, 4_096, 4_099)
    file.truncate(3)
    assert (file.reserved, files.size("a")) == (0, 3)
    file.close()


def test_failed_replacement_frees_its_room():
    """A replacement that the disk has no room for leaves the old file in place and frees the room
    it took.
    """
    disk = SimDisk()
    disk.make_folder("log")
    replace_file(disk, "log/a", b"one")
    disk.free_space = 10
    with pytest.raises(DiskFullError):
        replace_file(disk, "log/a", bytes(100))
    assert disk.free_space == 10
    assert disk.list("log") == ["a"]
    assert disk.pread("log/a", 0, 10) == b"one"


def test_folder_lists_replaces_renames_and_removes_names(disk):
    """Names are listed sorted; a file can be replaced, renamed and removed; what is missing is
    told.
    """
    disk.make_folder("log")
    disk.make_folder("log")
    replace_file(disk, "log/b", b"one")
    replace_file(disk, "log/b", b"two")
    replace_file(disk, "log/a", b"x")
    assert disk.list("log") == ["a", "b"]
    assert disk.pread("log/b", 0, 10) == b"two"
    disk.rename("log/a", "log/b")
    assert disk.pread("log/b", 0, 10) == b"x"
    disk.remove("log/b")
    assert disk.size("log/b") is None
    assert disk.list("log") == disk.list("nowhere") == []
    disk.sync_folder("log")
    assert disk.free_bytes() > 0
    for call in (
        lambda: disk.remove("log/b"),
        lambda: disk.rename("log/b", "log/c"),
        lambda: disk.pread("log/b", 0, 1),
        lambda: disk.open_append("nowhere/a"),
    ):
        with pytest.raises(StorageError):
            call()


def test_draft_left_by_a_crash_is_not_added_to(disk):
    """A replacement is written from its beginning, also when an earlier try left a draft."""
    disk.open_append("f.tmp").append([b"left over and longer"])
    replace_file(disk, "f", b"new")
    assert disk.pread("f", 0, 100) == b"new"


def test_disk_keeps_few_descriptors_open_with_many_readers(tmp_path, monkeypatch):
    """When many threads read many files, few stay open, and each read gets the right file."""
    monkeypatch.setattr(files_module, "READ_FILES_MAX", 4)
    disk = RealFiles(tmp_path)
    for number in range(20):
        file = disk.open_append(str(number))
        file.append([b"%04d" % number * 1000])
        file.close()
    before = len(os.listdir("/proc/self/fd"))
    wrong: list[int] = []

    def read(seed: int) -> None:
        rng = random.Random(seed)
        for _ in range(500):
            number = rng.randrange(20)
            if disk.pread(str(number), 4 * rng.randrange(900), 4) != b"%04d" % number:
                wrong.append(number)

    threads = [threading.Thread(target=read, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert len(os.listdir("/proc/self/fd")) - before <= 4
    disk.close()
    assert len(os.listdir("/proc/self/fd")) - before <= 0


# ── whose folder it is ────────────────────────────────────────────────────────────────────────────
def claimed(root: Path, group: str = "g1") -> str:
    disk = RealFiles(root)
    disk.lock()
    try:
        return claim_folder(disk, broker_group=group, rng=random.Random(4)).broker_id
    finally:
        disk.close()


def everything_in(root: Path) -> dict[str, bytes]:
    return {
        path.name: path.read_bytes()
        for path in sorted(root.iterdir())
        if path.name != "lock" and path.is_file()
    }


def test_identity_is_given_once(tmp_path):
    """A folder gets an identity when it is first used, and keeps it."""
    first = claimed(tmp_path / "new" / "deep")
    assert claimed(tmp_path / "new" / "deep") == first
    assert len(first) == 32


@pytest.mark.parametrize(
    ("identity", "words"),
    [
        ('{"format":1,"broker_id":"x","broker_group":"g2"}', "belongs to broker group g2"),
        ('{"format":9,"broker_id":"x","broker_group":"g1","new":1}', "format 9"),
        ("", "unreadable"),
        ("[]", "unreadable"),
        ("\0\0\0", "unreadable"),
    ],
)
def test_folder_of_another_owner_is_refused_by_name(tmp_path, identity, words):
    """Another group's folder, a newer format and a damaged identity are told apart; nothing is
    overwritten.
    """
    (tmp_path / "identity.json").write_text(identity)
    before = everything_in(tmp_path)
    with pytest.raises(DataFolderError, match=words):
        claimed(tmp_path)
    assert everything_in(tmp_path) == before


def test_folder_with_foreign_files_is_refused(tmp_path):
    """A folder that holds other things is not taken for a new data folder."""
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(DataFolderError, match=r"thesis\.tex"):
        claimed(tmp_path)
    assert everything_in(tmp_path) == {"thesis.tex": b"years of work"}
    with raises(Reason.NAME_INVALID):
        claimed(tmp_path / "x", group="../g")


def test_look_at_a_folder_that_is_no_brokers_advises_to_name_the_right_one():
    """The advice was to give a folder that the user may write, for `keylane broker verify` and a
    mistyped name.
    """
    with pytest.raises(DataFolderError, match="is not a broker's data folder") as refused:
        read_identity(SimDisk())
    assert "the folder that the broker was started with" in refused.value.hint


def test_second_broker_is_refused_while_the_folder_is_locked(tmp_path):
    """A folder in use is refused; it is free again when its user has ended."""
    first = RealFiles(tmp_path)
    first.lock()
    with pytest.raises(DataFolderError, match="another broker"):
        RealFiles(tmp_path).lock()
    first.close()
    second = RealFiles(tmp_path)
    second.lock()
    second.close()


async def test_follower_is_refused_while_another_has_its_folder(tmp_path):
    first = RealFiles(tmp_path)
    first.lock()
    write_copy_file(first, CopyFile(copy_id="c1", broker_group="g1", complete_at=0))
    before = sorted(path.name for path in tmp_path.iterdir())
    settings = BrokerSettings(group="g1", data=tmp_path, meta=["127.0.0.1:1"], follow=True)
    with pytest.raises(DataFolderError, match="another broker"):
        await run_follower(settings, asyncio.Event())
    assert sorted(path.name for path in tmp_path.iterdir()) == before
    first.close()


def test_folder_that_cannot_be_written_is_refused(tmp_path):
    """A file in the folder's place, or a folder without rights, is a DataFolderError."""
    (tmp_path / "file").write_text("")
    with pytest.raises(DataFolderError):
        RealFiles(tmp_path / "file").lock()
    with pytest.raises(DataFolderError):
        RealFiles("/proc/keylane").lock()
    if os.geteuid():  # root may write anywhere
        closed = tmp_path / "closed"
        closed.mkdir(mode=stat.S_IRUSR | stat.S_IXUSR)
        with pytest.raises(DataFolderError):
            RealFiles(closed).lock()
