"""What is kept of scheduled messages over restarts, and when the log is removed below them."""

from __future__ import annotations

import asyncio

import pytest

from keylane.broker.retention.policy import DiskUse, Limits, SealedSegment, wanted_position
from keylane.broker.scheduled.agenda import PATH
from keylane.broker.scheduled.records import (
    BODY_BYTES_MAX,
    Record,
    ScheduledMessageRecord,
    encode_records,
)
from keylane.broker.scheduled.schedule_index import SEARCH_COUNT, ScheduleIndex
from keylane.broker.storage.log.commit_log import segment_path
from keylane.protocol.errors import DataFolderError, StorageError
from keylane.protocol.record import HEADER_BYTES, Kind, read_record
from keylane.protocol.scheduled.receipt import CancelOutcome
from keylane.testing.machines.disk import SimDisk
from support.scheduling import (
    CLOCK,
    ScriptedSubjects,
    close_scheduler,
    message,
    open_scheduler,
    remove_old_log,
    running,
    until,
)


def waiting(number: int, value: bytes = b"v") -> ScheduledMessageRecord:
    at_ms = CLOCK.wall_ms() + 10_000_000
    return ScheduledMessageRecord(b"%016d" % number, at_ms, "s", 1, value, b"")


async def test_start_reads_the_copy_and_the_log_behind_it():
    disk = SimDisk()
    scheduler = open_scheduler(disk, count_max=20_000, bytes_max=1 << 24)
    count = 2 * SEARCH_COUNT + 100
    await scheduler.schedule([waiting(number) for number in range(count)])
    assert await scheduler._store.snapshotter.write()
    await scheduler.cancel(waiting(1).scheduled_id)
    await scheduler.schedule([waiting(count)])
    await close_scheduler(scheduler)
    position = scheduler._store.snapshotter.position
    again = open_scheduler(disk, count_max=20_000, bytes_max=1 << 24)
    assert again._agenda._position == position > 0
    assert again._schedule_index.entries == scheduler._schedule_index.entries
    assert await again.cancel(waiting(1).scheduled_id) is CancelOutcome.CANCELED


@pytest.mark.parametrize("damage", [b"", b"KSA1", b"KSA1" + bytes(40)], ids=["cut", "head", "crc"])
async def test_whole_log_is_read_when_the_copy_is_damaged(damage):
    disk = SimDisk()
    scheduler = open_scheduler(disk)
    await scheduler.schedule([waiting(number) for number in range(5)])
    assert await scheduler._store.snapshotter.write()
    await close_scheduler(scheduler)
    disk.contents[PATH].data[:] = damage
    again = open_scheduler(disk)
    assert again._schedule_index.entries == scheduler._schedule_index.entries
    assert again.problem == ""


async def test_copy_of_a_newer_version_is_refused():
    disk = SimDisk()
    scheduler = open_scheduler(disk)
    await scheduler.schedule([waiting(1)])
    assert await scheduler._store.snapshotter.write()
    await close_scheduler(scheduler)
    disk.contents[PATH].data[3] = ord("2")
    with pytest.raises(DataFolderError, match="newer"):
        open_scheduler(disk)


async def test_folder_without_scheduled_messages_has_no_copy():
    """And its snapshots are those of version 0.2, which may read them."""
    disk = SimDisk()
    scheduler = open_scheduler(disk)
    assert await scheduler._store.snapshotter.write()
    (name,) = disk.list("snapshot")
    assert disk.contents[f"snapshot/{name}"].data[8] == 1
    assert disk.size(PATH) is None
    await scheduler.schedule([waiting(1)])
    assert await scheduler._store.snapshotter.write()
    newest = max(disk.list("snapshot"))
    assert disk.contents[f"snapshot/{newest}"].data[8] == 2, "an older broker must not miss it"


async def test_message_stays_while_its_cancel_is_being_written():
    """A cancel that is not written is undone, and then the record of the message is needed after
    all.
    """
    disk = SimDisk()
    scheduler = open_scheduler(disk, segment_bytes=4_096)
    await scheduler.schedule([waiting(number) for number in range(3)])
    scheduler._schedule_index.cancel(waiting(0).scheduled_id)
    removing = asyncio.create_task(remove_old_log(scheduler))
    await asyncio.sleep(0.1)
    assert scheduler._store.log.first_position == 0
    scheduler._schedule_index.requeue([waiting(0).scheduled_id])
    await removing
    assert scheduler._store.log.first_position > 0
    await close_scheduler(scheduler)
    again = open_scheduler(disk, segment_bytes=4_096)
    assert len(again._schedule_index.entries) == 3


async def test_canceled_message_is_not_written_again_behind_its_cancel(monkeypatch):
    """A cancel between the read of a record and its write."""
    disk = SimDisk()
    scheduler = open_scheduler(disk, segment_bytes=4_096)
    await scheduler.schedule([waiting(number) for number in range(3)])
    canceled: list[CancelOutcome] = []
    read = scheduler._agenda.index.is_needed

    async def reads(function, *args):
        data = function(*args)
        if not canceled:
            canceled.append(await scheduler.cancel(waiting(0).scheduled_id))
        return data

    store = scheduler._store
    monkeypatch.setattr(store.carry_over, "_run_read", reads)
    await remove_old_log(scheduler)
    assert canceled == [CancelOutcome.CANCELED]
    assert not read(waiting(0).scheduled_id, scheduler._schedule_index.entries.popitem()[1].place)
    await close_scheduler(scheduler)
    again = open_scheduler(disk, segment_bytes=4_096)
    assert waiting(0).scheduled_id not in again._schedule_index.entries
    assert len(again._schedule_index.entries) == 2


async def test_message_is_delivered_when_its_record_was_written_again_during_the_read():
    disk, subjects = SimDisk(), ScriptedSubjects()
    scheduler = open_scheduler(disk, segment_bytes=4_096)
    await scheduler.schedule([message(b"a", 200)])
    store = scheduler._store
    real, moved = store.run_read, []

    async def reads(function, *args):
        if function == store.log.read and not moved:
            moved.append(True)
            await remove_old_log(scheduler)
        return await real(function, *args)

    store.run_read = reads
    async with running(scheduler, subjects):
        await until(lambda: subjects.values == [b"a"])
    assert moved


async def test_damaged_message_is_dropped_and_told_when_the_log_is_removed(caplog):
    """It would keep the log for ever; others are kept."""
    disk = SimDisk()
    scheduler = open_scheduler(disk, segment_bytes=4_096)
    for number in range(3):
        await scheduler.schedule([waiting(number)])
    place = scheduler._schedule_index.entries[waiting(1).scheduled_id].place
    disk.contents[segment_path(0)].data[place.position + HEADER_BYTES + 30] ^= 1
    await remove_old_log(scheduler)
    assert "1 scheduled message dropped" in caplog.text
    assert await scheduler.cancel(waiting(1).scheduled_id) is CancelOutcome.DROPPED
    await close_scheduler(scheduler)
    assert len(open_scheduler(disk, segment_bytes=4_096)._schedule_index.entries) == 2


async def test_log_stays_when_its_messages_cannot_be_read_at_present():
    class DiskWithoutReads(SimDisk):
        broken = False

        def preads(self, path, ranges):
            if self.broken:
                raise StorageError(f"{path}: input/output error")
            return super().preads(path, ranges)

    disk = DiskWithoutReads()
    scheduler = open_scheduler(disk, segment_bytes=4_096)
    await scheduler.schedule([waiting(1)])
    disk.broken = True
    with pytest.raises(StorageError):
        await remove_old_log(scheduler)
    assert scheduler._store.log.first_position == 0
    disk.broken = False
    await remove_old_log(scheduler)
    assert len(scheduler._schedule_index.entries) == 1


async def test_messages_over_one_record_are_durable_together():
    """They are several records of one commit, none over the limit of a record."""
    disk = SimDisk()
    scheduler = open_scheduler(disk, bytes_max=1 << 24, segment_bytes=1 << 24)
    messages = [waiting(number, bytes(700_000)) for number in range(4)]
    commits = scheduler._commit.commits
    assert await scheduler.schedule(messages) == [False] * 4
    assert scheduler._commit.commits == commits + 1
    places = {each.place for each in scheduler._schedule_index.entries.values()}
    assert len(places) == 4
    await close_scheduler(scheduler)
    assert len(open_scheduler(disk, bytes_max=1 << 24)._schedule_index.entries) == 4


def test_record_has_at_most_what_readers_take():
    changes: list[Record] = [waiting(number, bytes(1 << 19)) for number in range(5)]
    records = encode_records(changes)
    assert [change for record in records for change in record.changes] == changes
    for record in records:
        header = read_record(record.data)
        assert header.kind == Kind.SCHEDULED
        assert header.length - HEADER_BYTES <= BODY_BYTES_MAX


async def test_kept_bytes_are_those_of_the_segment():
    scheduler = open_scheduler(SimDisk(), segment_bytes=4_096)
    for number in range(150):
        await scheduler.schedule([waiting(number)])
    bases = scheduler._store.log.bases
    assert len(bases) > 2
    kept = await scheduler._agenda.kept_bytes(bases)
    assert sum(kept) == scheduler._schedule_index.bytes
    assert all(0 < size <= 4_096 for size in kept[:-1])


DAY = 86_400_000


@pytest.mark.parametrize(
    ("kept", "limits", "percent", "wanted"),
    [
        ((0, 0, 0), (0, 0), 86, 300),
        ((90, 0, 0), (0, 0), 86, 300),
        ((90, 90, 90), (0, 0), 86, 0),
        ((90, 90, 90), (DAY, 0), 0, 300),
        ((0, 0, 0), (0, 150), 0, 300),
        ((50, 0, 0), (0, 150), 0, 200),
        ((90, 90, 90), (0, 150), 0, 0),
    ],
    ids=["none", "pays", "pays not", "old", "bytes", "fewer bytes", "bytes of scheduled"],
)
def test_segments_of_waiting_messages_are_removed_when_it_frees_something(
    kept, limits, percent, wanted
):
    segments = [
        SealedSegment(100 * number, 100 * number + 100, 0, size) for number, size in enumerate(kept)
    ]
    disk = DiskUse(free_bytes=(100 - percent) * 1_000_000, total_bytes=100_000_000)
    policy = Limits(retention_ms=limits[0], retention_bytes=limits[1])
    assert wanted_position(segments, policy, disk, end=400, now_ms=2 * DAY) == wanted


def test_images_are_short_steps():
    index = ScheduleIndex()
    for number in range(3 * SEARCH_COUNT):
        index.replay(waiting(number), (number, 1))
    assert max(len(image.entries) for image in index.images()) == SEARCH_COUNT
