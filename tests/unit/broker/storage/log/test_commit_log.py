"""Where records go in the log: positions without a gap, rolls between records, barriers where all
before is durable.
"""

from __future__ import annotations

import pytest

from keylane.broker.storage.log.commit_log import (
    BARRIER,
    RESERVED_BYTES,
    SMALL_BYTES_MAX,
    CommitLog,
    WritePlan,
    segment_path,
)
from keylane.broker.storage.log.holes import Hole
from keylane.broker.storage.log.recovery import recover_log
from keylane.protocol.errors import FlushFailedError
from keylane.protocol.record import Header, read_record
from keylane.testing.machines.disk import SimDisk
from sim.machines.store import batch


def test_records_follow_each_other_and_segments_join():
    """Positions are contiguous, a record is never cut by a segment, and only the first one has the
    barrier: when a later one is written, copies may lack what is before it.
    """
    record = batch()
    length = len(record)
    plan = WritePlan(base=0, end=0, segment_bytes=2 * length + 10)
    positions = [plan.add(record, base_offset=2 * n, appended_at_ms=5)[0] for n in range(5)]

    assert positions == [n * length for n in range(5)]
    assert [base for base, _ in plan.chunks] == [0, 2 * length, 4 * length]
    flags = []
    for base, buffers in plan.chunks:
        data = b"".join(buffers)
        at = 0
        while at < len(data):
            header = read_record(data, at)
            assert isinstance(header, Header)
            assert header.position == base + at
            flags.append(bool(header.flags & BARRIER))
            at += header.length
    assert flags == [True, False, False, False, False]


def test_sender_cannot_set_the_barrier():
    """The barrier is the broker's word: a flag that comes with a batch is cleared."""
    record = bytearray(batch())
    record[15] |= BARRIER
    plan = WritePlan(base=0, end=0, segment_bytes=1 << 20)
    plan.add(batch(), base_offset=0, appended_at_ms=0)
    _, header = plan.add(record, base_offset=2, appended_at_ms=0)

    assert not header[15] & BARRIER


def test_record_longer_than_a_segment_gets_one_of_its_own():
    """A record may be longer than the segments are: it is alone in its own."""
    small, large = batch(), batch(count=200)
    plan = WritePlan(base=0, end=0, segment_bytes=len(small))
    for record in (large, small, large):
        plan.add(record, base_offset=0, appended_at_ms=0)

    assert [sum(map(len, buffers)) for _, buffers in plan.chunks] == list(
        map(len, (large, small, large))
    )


def test_segments_are_named_by_their_position():
    """Twenty digits, so that names sort as positions do."""
    assert segment_path(1 << 30) == "log/00000000001073741824.log"


def open_log(disk: SimDisk, *, segment_bytes: int = 1 << 30) -> CommitLog:
    """The log of a disk, as recovery leaves it."""
    recovered = recover_log(disk, NoVisitor())
    return CommitLog(disk, segment_bytes=segment_bytes, bases=recovered.bases, end=recovered.end)


class NoVisitor:
    """Takes no note of what recovery finds."""

    def on_record(self, header: Header, body: memoryview) -> None: ...

    def on_hole(self, hole: Hole) -> None:
        raise AssertionError(hole)


def disk_that_reserves() -> SimDisk:
    disk = SimDisk()
    disk.reserves = True
    return disk


def planned(log: CommitLog, *records: bytes) -> WritePlan:
    plan = log.plan()
    for record in records:
        plan.add(record, base_offset=0, appended_at_ms=0)
    return plan


def test_small_plans_are_written_into_reserved_bytes():
    """The first one reserves them with its own sync; those behind it leave the size of the file as
    it is.
    """
    disk = disk_that_reserves()
    log = open_log(disk)
    first, second = batch(), batch(sequence=2)
    assert log.begin_write(planned(log, first)) is None
    log.write(planned(log, first))
    assert disk.size(segment_path(0)) == RESERVED_BYTES
    plan = planned(log, second)
    file = log.begin_write(plan)
    assert file is not None
    file.fdatasync()
    log.end_write(plan)
    assert disk.size(segment_path(0)) == RESERVED_BYTES
    assert log.read(len(first), len(second))[96:] == second[96:]
    assert not any(disk.pread(segment_path(0), plan.end, RESERVED_BYTES))


def test_plan_is_read_from_memory_when_it_is_written_and_not_durable():
    """It is there before the last sync, in both of its segments."""
    disk = SimDisk()
    log = open_log(disk, segment_bytes=3 * len(batch()))
    log.write(planned(log, batch()))
    start, plan = log.end, planned(log, *4 * [batch()])
    seen: list[tuple[int, int]] = []
    log.write_bytes(plan, lambda: seen.append((log.written_end, disk.syncs)))

    assert seen == [(plan.end, disk.syncs - 1)]
    middle = plan.chunks[1][0]
    ranges = [(start, 1), (start + 5, middle - start - 5), (middle, plan.end - middle)]
    assert [log.read_unsynced(*each) for each in ranges] == [log.read(*each) for each in ranges]
    assert log.read_unsynced(start - 1, 2) is None
    log.end_write(plan)
    assert log.written_end == log.end == plan.end
    assert log.read_unsynced(start, 1) is None


def test_reserved_bytes_are_cut_when_a_segment_ends_and_when_the_log_is_closed():
    """Files of sealed segments, and of a log that was closed, end with their last record."""
    disk, record = disk_that_reserves(), batch()
    log = open_log(disk, segment_bytes=2 * len(record))
    for _ in range(3):
        log.write(planned(log, record))
    assert disk.size(segment_path(0)) == 2 * len(record)
    assert disk.size(segment_path(log.bases[1])) == 2 * len(record)
    log.close()
    assert disk.size(segment_path(log.bases[1])) == len(record)


def test_reserved_bytes_are_used_up_before_more_are_reserved():
    """A plan that does not fit into what is left is written where bytes are reserved first."""
    disk, record = disk_that_reserves(), batch()
    log = open_log(disk)
    log.write(planned(log, record))
    file = log.begin_write(planned(log))
    assert file is not None
    file.truncate(file.size)  # none are left
    assert log.begin_write(planned(log, record)) is None
    log.write(planned(log, record))
    assert file.reserved == RESERVED_BYTES - len(record)


def test_large_plan_reserves_nothing():
    """Bytes of the disk are not taken for a log whose writes gain nothing."""
    disk, record = disk_that_reserves(), batch(count=SMALL_BYTES_MAX // 32 + 1)
    log = open_log(disk)
    assert len(record) > SMALL_BYTES_MAX
    log.write(planned(log, record))
    assert disk.size(segment_path(0)) == len(record)


@pytest.mark.parametrize("full", [False, True])
def test_small_plan_is_written_without_reserved_bytes_when_the_disk_has_none(full):
    """A file system without this way, or without the room, takes plans as they come."""
    disk, record = disk_that_reserves(), batch()
    disk.reserves, disk.free_space = full, 10 * len(record)
    log = open_log(disk)
    log.write(planned(log, record))
    assert disk.size(segment_path(0)) == len(record)
    assert log.begin_write(planned(log, record)) is not None


def test_log_is_not_written_when_its_file_is_longer_than_the_log():
    """A record is put behind the end that recovery found, and never behind other bytes."""
    disk, record = disk_that_reserves(), batch()
    log = open_log(disk)
    log.write(planned(log, record))
    log = CommitLog(disk, segment_bytes=1 << 30, bases=[0], end=len(record))
    with pytest.raises(FlushFailedError, match="has 1048576 bytes"):
        log.write(planned(log, record))


def test_close_cuts_no_bytes_when_a_write_has_failed():
    """What a failed plan has left is for the next start to judge."""
    disk, record = disk_that_reserves(), batch()
    log = open_log(disk)
    log.write(planned(log, record))
    assert log.begin_write(planned(log, record)) is not None  # its sync never ends
    log.close()
    assert disk.size(segment_path(0)) == RESERVED_BYTES
    assert open_log(disk).end == 2 * len(record)
