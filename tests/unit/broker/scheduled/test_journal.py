"""The journal of scheduled messages on a simulated disk: segments, unfinished writes, damage, newer
formats.
"""

from __future__ import annotations

import random

import pytest

from keylane.broker.scheduled.journal import ScheduledJournal, segment_path
from keylane.broker.scheduled.records import (
    FRAME_BYTES_MAX,
    Canceled,
    Place,
    Record,
    ScheduledMessageRecord,
)
from keylane.protocol.errors import (
    CorruptLogError,
    DataFolderError,
    DiskFullError,
    FlushFailedError,
)
from keylane.testing.machines.disk import SimDisk

FIRST, SECOND = segment_path(1), segment_path(2)


def records(count: int = 3) -> list[Record]:
    return [Canceled(bytes([each]) * 16) for each in range(count)]


def opened(disk: SimDisk, *, cut: bool = True) -> tuple[ScheduledJournal, list[Record]]:
    """The journal as a start finds it, and its records."""
    read: list[Record] = []
    journal = ScheduledJournal.open(
        disk, lambda _place, more: read.extend(more), segment_bytes=200, must_cut=cut
    )
    return journal, read


def written(count: int = 3) -> tuple[SimDisk, list[Place]]:
    """A journal with a record in each frame."""
    disk = SimDisk()
    journal, _ = opened(disk)
    return disk, [journal.append([record]) for record in records(count)]


def overwrite(disk: SimDisk, path: str, position: int, data: bytes) -> None:
    content = disk.pread(path, 0, disk.size(path) or 0)
    disk.remove(path)
    file = disk.open_append(path)
    file.append([content[:position] + data + content[position + len(data) :]])
    file.fdatasync()


def test_journal_without_messages_has_no_folder():
    disk = SimDisk()
    journal, _ = opened(disk)
    assert "scheduled" not in disk.folders
    assert journal.size_bytes == 0


def test_frames_are_read_back_over_segments():
    disk, places = written(12)
    assert {place.segment for place in places} == {1, 2, 3, 4}
    journal, read = opened(disk)
    assert read == records(12)
    assert [journal.read(place) for place in places] == [[record] for record in records(12)]
    assert journal.read_segment(1) == records(12)[: sum(place.segment == 1 for place in places)]
    assert journal.append(records(1)) == Place(5, 0, places[0].length)


def test_segments_are_removed_from_the_first_on():
    disk, _ = written(12)
    journal, _ = opened(disk)
    journal.remove(1)
    assert journal.segments[0] == 2
    assert opened(disk)[0].segments[0] == 2
    with pytest.raises(AssertionError):
        journal.remove(3)


def test_unfinished_write_is_cut():
    """At a start; a command that only looks changes no byte."""
    disk, places = written()
    size = disk.size(FIRST)
    file = disk.open_append(FIRST)
    file.append([disk.pread(FIRST, places[0].position, places[0].length)[:-1]])
    assert opened(disk, cut=False)[1] == records()
    assert disk.size(FIRST) == size + places[0].length - 1
    journal, read = opened(disk)
    assert (read, journal.problems) == (records(), [])
    assert disk.size(FIRST) == size
    journal.append(records(1))
    assert opened(disk)[1] == [*records(), *records(1)]


def test_damage_before_a_whole_frame_is_told_and_not_cut():
    disk, places = written()
    overwrite(disk, FIRST, places[1].position + 40, b"\xff")
    size = disk.size(FIRST)
    journal, read = opened(disk)
    assert read == records(1)
    assert journal.problems == [
        f"{FIRST}: bytes {places[1].position} to {places[2].position} are damaged"
    ]
    assert disk.size(FIRST) == size
    with pytest.raises(CorruptLogError):
        journal.read(places[1])


def test_damage_at_the_end_of_a_segment_is_told_unless_it_is_the_last():
    disk, places = written(12)
    end = max(place.position for place in places if place.segment == 1)
    overwrite(disk, FIRST, end + 40, b"\xff")
    assert opened(disk)[0].problems == [f"{FIRST}: damaged from byte {end} on"]


def test_missing_segment_is_told():
    disk, _ = written(12)
    disk.remove(SECOND)
    assert opened(disk)[0].problems == ["scheduled: segment 2 is missing"]


def test_frame_at_another_place_is_no_frame():
    disk, places = written(2)
    copied = disk.pread(FIRST, places[0].position, places[0].length)
    overwrite(disk, FIRST, places[1].position, copied)
    assert opened(disk)[1] == records(1)


def test_newer_format_is_refused():
    disk, places = written()
    overwrite(disk, FIRST, places[2].position, b"KLS3")
    with pytest.raises(DataFolderError, match="newer"):
        opened(disk)


def test_frame_that_a_failed_sync_left_in_the_page_cache_is_durable_when_the_journal_is_opened():
    """Its bytes are taken for clean, so that the sync of the next frame does not write them."""
    disk, _ = written(1)
    journal, _ = opened(disk)
    for each in records(3)[1:]:
        disk.failing_operation = "fdatasync"
        with pytest.raises(FlushFailedError):
            journal.append([each])
        with pytest.raises(FlushFailedError):
            opened(disk)
        disk.failing_operation = ""
        journal, _ = opened(disk)
    journal.append(records(1))
    again, read = opened(disk.disk_after_crash(random.Random(1)))
    assert again.problems == []
    assert read == [*records(), *records(1)]


@pytest.mark.parametrize("seed", range(8))
def test_name_of_the_first_segment_is_durable_when_the_journal_is_opened(seed: int):
    """The process before had written a frame, and ended before it had synced the folder."""
    disk, _ = written(1)
    disk._durable_names["scheduled"] = {}
    journal, _ = opened(disk)
    journal.append(records(2)[1:])
    assert opened(disk.disk_after_crash(random.Random(seed)))[1] == records(2)


def test_look_at_a_journal_writes_nothing():
    disk, _ = written()
    steps = disk.steps
    opened(disk, cut=False)
    assert disk.steps == steps


def test_full_disk_keeps_nothing_of_a_frame():
    disk, _ = written()
    journal, _ = opened(disk)
    disk.free_space = 10
    with pytest.raises(DiskFullError):
        journal.append(records(2))
    disk.free_space = None
    journal.append(records(1))
    assert opened(disk)[1] == [*records(), *records(1)]


def test_unfinished_write_is_no_damage_when_the_next_frame_begins_a_segment():
    """A full disk keeps a part of a frame, and the next frame is longer than the segment has room
    for.
    """
    disk, places = written(2)
    journal, _ = opened(disk)
    disk.free_space = 10
    with pytest.raises(DiskFullError):
        journal.append(records(1))
    disk.free_space = None
    assert (disk.size(FIRST) or 0) > places[1].position + places[1].length
    assert journal.append(records(5)).segment == 2
    again, read = opened(disk)
    assert again.problems == []
    assert read == [*records(2), *records(5)]


def test_frame_over_its_limit_is_refused_and_nothing_is_written():
    """A start would take it for a write that was cut."""
    disk = SimDisk()
    journal, _ = opened(disk)
    with pytest.raises(ValueError, match="a frame of"):
        journal.append([ScheduledMessageRecord(b"0" * 16, 1, "s", 1, bytes(FRAME_BYTES_MAX), b"")])
    assert journal.size_bytes == 0
    assert opened(disk)[1] == []
