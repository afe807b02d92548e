"""The journal of version 0.2 is read once, moved into the log, and removed; also when the machine
stops in between, and never when it is damaged.
"""

from __future__ import annotations

import random

import pytest

from keylane.broker.scheduled.old_journal import journal_segments, read_journal, segment_path
from keylane.broker.scheduled.records import (
    Canceled,
    Delivered,
    DroppedMessages,
    Record,
    ScheduledMessageRecord,
    Taken,
    bind_to_subject,
)
from keylane.protocol.errors import CorruptLogError, DataFolderError
from keylane.protocol.scheduled.receipt import CancelOutcome
from keylane.testing.machines.disk import Crashed, SimDisk
from support.old_journal import encode_frame, write_journal
from support.scheduling import (
    ScriptedSubjects,
    close_scheduler,
    message,
    open_scheduler,
    running,
    until,
)

FIRST, SECOND = segment_path(1), segment_path(2)
A, B, C = (message(name, 86_400_000) for name in (b"a", b"b", b"c"))
SOON = message(b"soon", 0)
GONE = message(b"gone", 86_400_000)
FRAMES: list[list[Record]] = [
    [A, GONE, bind_to_subject(B, 7)],
    [C, Canceled(GONE.scheduled_id)],
    [SOON, message(b"d", 0)],
    [Taken("key", "s", 5, (SOON.scheduled_id,))],
    [Taken("key-2", "s", 5, (message(b"d").scheduled_id,))],
    [Delivered("key-2", (message(b"d").scheduled_id,))],
    [A],
    [message(b"e"), DroppedMessages((message(b"e").scheduled_id,))],
]


def overwrite(disk: SimDisk, path: str, position: int, data: bytes) -> None:
    content = disk.pread(path, 0, disk.size(path) or 0)
    disk.remove(path)
    file = disk.open_append(path)
    file.append([content[:position] + data + content[position + len(data) :]])
    file.fdatasync()


def old_disk(**changes: int) -> SimDisk:
    disk = SimDisk()
    write_journal(disk, FRAMES, **{"segment_bytes": 300} | changes)
    return disk


async def test_content_of_a_journal_is_moved_into_the_log():
    """What waits, the open delivery under its key, and what became of others."""
    disk, subjects = old_disk(), ScriptedSubjects()
    assert len(journal_segments(disk)) > 2
    scheduler = open_scheduler(disk)
    assert journal_segments(disk) == []
    assert scheduler.view()["count"] == 4
    entries = scheduler._schedule_index.entries
    assert entries[B.scheduled_id].subject_id == 7
    async with running(scheduler, subjects):
        await until(lambda: scheduler.view()["count"] == 3)
        assert subjects.batches == {"key": [b"soon"]}
        assert await scheduler.schedule([GONE, message(b"d"), message(b"e")]) == [True] * 3
        outcomes = [
            await scheduler.cancel(each.scheduled_id)
            for each in (A, GONE, message(b"d"), message(b"e"))
        ]
    assert outcomes == [
        *(CancelOutcome.CANCELED, CancelOutcome.CANCELED),
        *(CancelOutcome.DELIVERED, CancelOutcome.DROPPED),
    ]
    again = open_scheduler(disk)
    assert again._schedule_index.entries.keys() == {B.scheduled_id, C.scheduled_id}


async def test_journal_is_moved_once_when_the_machine_stops_at_any_step():
    """A start after it has all that waits, each once, and delivers the open delivery under its
    key.
    """
    rng = random.Random(5)
    survived = 0
    for crash_at in range(1, 200):
        disk, subjects = old_disk(), ScriptedSubjects()
        disk.crash_at = crash_at
        try:
            scheduler = open_scheduler(disk)
            survived += 1
        except Crashed:
            disk = disk.disk_after_crash(rng)
            scheduler = open_scheduler(disk)
        disk.crash_at = None
        assert scheduler.problem == "", crash_at
        assert scheduler.view()["count"] == 4, crash_at
        async with running(scheduler, subjects):
            await until(lambda scheduler=scheduler: scheduler.view()["count"] == 3)
        assert subjects.batches == {"key": [b"soon"]}, crash_at
        again = open_scheduler(disk)
        assert again._schedule_index.entries.keys() == {each.scheduled_id for each in (A, B, C)}, (
            crash_at
        )
        entries = list(again._schedule_index.entries.values())
        assert len(await again._read_messages(entries)) == 3
        if survived == 3:
            return
    raise AssertionError("the start has more steps than were tried")


async def test_journal_is_moved_by_a_later_start_when_the_disk_is_full():
    disk = SimDisk()
    large = [
        [ScheduledMessageRecord(b"%016d" % number, A.deliver_at_ms, "s", 1, bytes(900_000), b"")]
        for number in range(6)
    ]
    write_journal(disk, large)
    disk.free_space = 3_000_000
    scheduler = open_scheduler(disk, bytes_max=1 << 24)
    assert "cannot be moved" in scheduler.problem
    with pytest.raises(CorruptLogError, match="cannot be moved"):
        await scheduler.schedule([A])
    await close_scheduler(scheduler)
    disk.free_space = None
    scheduler = open_scheduler(disk, bytes_max=1 << 24)
    assert scheduler.problem == ""
    assert scheduler.view()["count"] == 6
    entries = list(scheduler._schedule_index.entries.values())
    assert len(await scheduler._read_messages(entries)) == 6
    assert journal_segments(disk) == []


def damaged_inside() -> SimDisk:
    disk = old_disk()
    overwrite(disk, FIRST, 100, b"\xff\xff")
    return disk


def missing_segment() -> SimDisk:
    disk = old_disk()
    disk.remove(SECOND)
    return disk


@pytest.mark.parametrize("damaged", [damaged_inside, missing_segment])
async def test_damaged_journal_is_told_and_stays_as_it_is(damaged):
    """A record that is lost may say that a message was canceled: nothing is delivered."""
    disk, subjects = damaged(), ScriptedSubjects()
    before = {path: bytes(content.data) for path, content in disk.contents.items()}
    scheduler = open_scheduler(disk)
    async with running(scheduler, subjects):
        assert "damaged" in scheduler.problem or "missing" in scheduler.problem
        with pytest.raises(CorruptLogError):
            await scheduler.schedule([message(b"new")])
    assert subjects.values == []
    assert all(bytes(disk.contents[path].data) == data for path, data in before.items())


def test_unfinished_write_is_no_damage():
    disk = SimDisk()
    write_journal(disk, [[A], [B]])
    first = len(encode_frame([A], segment=1, position=0))
    for cut in range(first, disk.size(FIRST) or 0, 9):
        disk = SimDisk()
        write_journal(disk, [[A], [B]])
        file = disk.open_append(FIRST)
        file.truncate(cut)
        read: list[Record] = []
        assert read_journal(disk, lambda _s, _p, more, read=read: read.extend(more)) == []
        assert read == [A]


def test_newer_format_is_refused():
    disk = old_disk()
    overwrite(disk, FIRST, 3, b"3")
    with pytest.raises(DataFolderError, match="newer"):
        open_scheduler(disk)
