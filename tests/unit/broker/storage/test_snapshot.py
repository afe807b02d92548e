"""Snapshots: a damaged one counts as missing, the newest full one counts, old ones are removed."""

from __future__ import annotations

import random

import pytest

from keylane.broker.storage.snapshot import (
    INCREMENTAL_MAX,
    Extra,
    Snapshots,
    encode_chunk,
)
from keylane.protocol.errors import DataFolderError, StorageError
from keylane.testing.machines.disk import Crashed, SimDisk

Images = dict[int, bytes]


def put(snapshots: Snapshots, position: int, images: Images, *, full: bool | None = None) -> None:
    snapshots.write(
        [encode_chunk(list(images.items()))] if images else [],
        full=snapshots.is_full_due() if full is None else full,
        clean=False,
        position=position,
        extra=Extra({9: position}, ["p"]),
    )


def loaded(disk: SimDisk) -> tuple[int, Images]:
    images: Images = {}
    loaded = Snapshots(disk).load(images.__setitem__)
    return loaded.position, images


def names(disk: SimDisk) -> list[int]:
    return [int(name[:10]) for name in disk.list("snapshot")]


def test_incremental_snapshots_after_a_full_one():
    """The first is full, the next ones are incremental; together they are the newest state."""
    disk = SimDisk()
    snapshots = Snapshots(disk)
    assert loaded(disk) == (0, {})
    assert snapshots.is_full_due()
    put(snapshots, 100, {1: b"one", 2: b"two"})
    assert not snapshots.is_full_due()
    put(snapshots, 200, {2: b"TWO"})
    put(snapshots, 300, {})
    assert loaded(disk) == (300, {1: b"one", 2: b"TWO"})
    extra = Snapshots(disk).load(lambda _number, _image: None).extra
    assert extra == Extra({9: 300}, ["p"])


def test_old_ones_go():
    """The newest full one, the full one before it and what follows each are kept, and nothing
    else.
    """
    disk = SimDisk()
    snapshots = Snapshots(disk)
    for number in range(1, 9):
        put(snapshots, number, {number: b"x"}, full=number in {1, 3, 6})
    assert names(disk) == [3, 4, 5, 6, 7, 8]


def test_full_snapshot_is_due_after_many_changes():
    """Incremental snapshots that outgrow the full one, or are too many, make a full one due."""
    snapshots = Snapshots(SimDisk())
    put(snapshots, 1, {1: bytes(1000)})
    put(snapshots, 2, {1: bytes(2 << 20)})
    assert snapshots.is_full_due()
    put(snapshots, 3, {1: bytes(1000)})
    for number in range(INCREMENTAL_MAX):
        assert not snapshots.is_full_due(), number
        put(snapshots, 4 + number, {1: b""})
    assert snapshots.is_full_due()


@pytest.mark.parametrize("what", ["flip", "cut", "zero", "empty", "longer"])
def test_damage_of_the_newest(what):
    """Any damage to the newest one leaves the ones before it, wherever it is."""
    rng = random.Random(what)
    for _ in range(150):
        disk = SimDisk()
        snapshots = Snapshots(disk)
        put(snapshots, 10, {1: b"one", 2: b"two"})
        put(snapshots, 20, {1: b"ONE"})
        put(snapshots, 30, {2: b"TWO", 3: bytes(50)}, full=rng.random() < 0.5)
        data = disk.contents["snapshot/0000000003.snap"].data
        at = rng.randrange(len(data))
        match what:
            case "flip":
                data[at] ^= 1 << rng.randrange(8)
            case "cut":
                del data[at:]
            case "zero":
                if not any(data[at : at + 16]):
                    continue
                data[at : at + 16] = bytes(len(data[at : at + 16]))
            case "empty":
                data.clear()
            case "longer":
                data += b"x"
        assert loaded(disk) == (20, {1: b"ONE", 2: b"two"})
        again = Snapshots(disk)
        again.load(lambda _number, _image: None)
        assert again.is_full_due()
        put(again, 40, {1: b"1"})
        assert loaded(disk) == (40, {1: b"1"})


def test_load_gives_nothing_when_every_snapshot_is_damaged_or_deleted():
    """Without a full snapshot there is none: the state is rebuilt from the log."""
    disk = SimDisk()
    snapshots = Snapshots(disk)
    put(snapshots, 10, {1: b"one"})
    put(snapshots, 20, {1: b"two"})
    disk.contents["snapshot/0000000001.snap"].data[30] ^= 1
    assert loaded(disk)[0] == 0


def test_newer_format_refuses_the_start():
    """A snapshot of a newer broker is not damage, and is not overwritten."""
    disk = SimDisk()
    put(Snapshots(disk), 10, {1: b"one"})
    import struct

    import crc32c

    data = disk.contents["snapshot/0000000001.snap"].data
    struct.pack_into("<I", data, 8, 3)
    struct.pack_into("<I", data, 4, crc32c.crc32c(bytes(data[8:40])))
    with pytest.raises(DataFolderError, match="format 3"):
        loaded(disk)


def test_other_files_are_left_alone():
    """Names that are no snapshot's are neither read nor removed."""
    disk = SimDisk()
    snapshots = Snapshots(disk)
    put(snapshots, 1, {1: b"x"}, full=True)
    disk.open_append("snapshot/notes.txt").append([b"mine"])
    disk.open_append("snapshot/0000000001.snap.bak").append([b"mine"])
    for number in range(2, 6):
        put(snapshots, number, {1: b"x"}, full=True)
    assert loaded(disk) == (5, {1: b"x"})
    assert {"notes.txt", "0000000001.snap.bak"} < set(disk.list("snapshot"))


def test_crash_at_every_operation_of_a_snapshot():
    """Whatever of it was there, the start finds this one or the one before."""
    for crash_at in range(1, 20):
        for seed in range(5):
            disk = SimDisk()
            snapshots = Snapshots(disk)
            put(snapshots, 10, {1: b"one"})
            disk.crash_at = disk.steps + crash_at
            try:
                put(snapshots, 20, {1: b"two"}, full=True)
            except Crashed:
                state = loaded(disk.disk_after_crash(random.Random(seed)))
                assert state in [(10, {1: b"one"}), (20, {1: b"two"})]
            else:
                assert loaded(disk.disk_after_crash(random.Random(seed))) == (20, {1: b"two"})


def test_full_disk_keeps_the_one_before():
    """A snapshot that cannot be written is not there, and the next one is."""
    disk = SimDisk()
    snapshots = Snapshots(disk)
    put(snapshots, 10, {1: b"one"})
    disk.free_space = 10
    with pytest.raises(StorageError):
        put(snapshots, 20, {1: b"two"})
    assert loaded(disk) == (10, {1: b"one"})
    disk.free_space = None
    put(snapshots, 30, {1: b"three"})
    assert loaded(disk) == (30, {1: b"three"})
