"""The log of a copy: whatever bytes come and whenever it crashes, it is the beginning of the
broker's.
"""

from __future__ import annotations

import logging
import random

import crc32c
import pytest

from keylane.broker.copies.copied_log import COMPARED_BYTES, CopiedLog
from keylane.broker.storage.log.commit_log import WritePlan, segment_path
from keylane.broker.storage.log.trail import durable_end
from keylane.testing.machines.disk import SimDisk
from sim.machines.store import batch

SEGMENT_BYTES = 8_000


def broker_log(records: int, *, first: int = 0) -> dict[int, bytes]:
    """Segments by base, with records of several commits."""
    segments: dict[int, bytearray] = {}
    base = end = first
    for number in range(records):
        plan = WritePlan(base=base, end=end, segment_bytes=SEGMENT_BYTES)
        plan.add(batch(value=b"v" * (number * 37 % 900)), base_offset=number, appended_at_ms=1)
        for base, buffers in plan.chunks:
            segments.setdefault(base, bytearray()).extend(b"".join(buffers))
        end = plan.end
    return {base: bytes(data) for base, data in segments.items()}


def end_of(segments: dict[int, bytes]) -> int:
    base = max(segments)
    return base + len(segments[base])


def next_bytes(segments: dict[int, bytes], position: int, rng: random.Random) -> tuple[int, bytes]:
    """The segment, and some bytes of it from a position on, as a broker answers."""
    segment = max(base for base in segments if base <= position)
    start = position - segment
    return segment, segments[segment][start : start + rng.randint(1, 3_000)]


def copied_segments(disk: SimDisk, bases: list[int]) -> dict[int, bytes]:
    return {
        base: disk.pread(segment_path(base), 0, disk.size(segment_path(base)) or 0)
        for base in bases
    }


@pytest.mark.parametrize("seed", range(40))
def test_copied_log_is_the_brokers_when_it_crashes_again_and_again(seed: int):
    """A crash may keep any of the bytes that were not synced; the copy goes on where it ends."""
    rng = random.Random(seed)
    segments = broker_log(60)
    disk = SimDisk()
    log = CopiedLog(disk)
    log.begin(0)
    while log.end < end_of(segments):
        segment, data = next_bytes(segments, log.end, rng)
        if rng.random() < 0.15:
            file = disk.open_append(segment_path(segment)) if segment == log.segment else None
            if file is not None:
                file.append([data])  # the crash comes before the sync
            log.close()
            disk = disk.disk_after_crash(rng)
            before = log.end
            log = CopiedLog(disk)
            if log.end < 0:
                log.begin(0)
            assert log.end <= before + len(data)
            continue
        log.append(segment, data)
    log.close()
    assert copied_segments(disk, sorted(segments)) == segments
    assert durable_end(disk, max(segments)) <= end_of(segments)


def test_trail_of_a_copied_log_reaches_its_end_when_it_did_not_crash():
    segments = broker_log(60)
    disk = SimDisk()
    log = CopiedLog(disk)
    log.begin(0)
    rng = random.Random(1)
    while log.end < end_of(segments):
        log.append(*next_bytes(segments, log.end, rng))
    log.close()
    assert durable_end(disk, max(segments)) == end_of(segments)


def test_copied_log_cuts_what_a_crash_has_torn_although_a_barrier_follows():
    """BARRIER says what was durable at the broker, and nothing of this disk."""
    segments = broker_log(6)
    disk = SimDisk()
    log = CopiedLog(disk)
    log.begin(0)
    lengths = [len(batch(value=b"v" * (number * 37 % 900))) for number in range(6)]
    synced = sum(lengths[:2])
    log.append(0, segments[0][:synced])
    log.close()
    torn = bytearray(segments[0][synced:])
    torn[10:60] = bytes(50)
    file = disk.open_append(segment_path(0))
    file.append([bytes(torn)])
    file.fdatasync()
    file.close()
    assert CopiedLog(disk).end == synced


@pytest.mark.parametrize("chunk", [50, 1_000, 1 << 20])
def test_copied_log_keeps_what_follows_damage_of_the_broker_when_it_is_opened_again(
    caplog: pytest.LogCaptureFixture, chunk: int
):
    """The bytes are kept as they are, the log line says where, and the trail goes on behind them,
    so the later records count as durable.
    """
    segments = broker_log(6)
    damaged = bytearray(segments[0])
    start = len(batch(value=b""))
    damaged[start : start + 40] = b"x" * 40
    disk = SimDisk()
    log = CopiedLog(disk)
    log.begin(0)
    with caplog.at_level(logging.WARNING, "keylane.broker"):
        while log.end < len(damaged):
            log.append(0, bytes(damaged[log.end : log.end + chunk]))
    log.close()
    assert caplog.text.count(f"damaged at position {start}") == 1
    assert durable_end(disk, 0) == len(damaged)
    opened = CopiedLog(disk)
    assert (opened.end, opened.has_lost_bytes) == (len(damaged), False)
    assert copied_segments(disk, [0])[0] == bytes(damaged)


def test_copied_log_says_that_its_end_is_lost_when_synced_bytes_are_gone():
    segments = broker_log(6)
    disk = SimDisk()
    log = CopiedLog(disk)
    log.begin(0)
    log.append(0, segments[0])
    log.close()
    file = disk.open_append(segment_path(0))
    file.truncate(len(segments[0]) - 200)
    file.close()
    assert CopiedLog(disk).has_lost_bytes


@pytest.mark.parametrize("torn", [b"", b"torn"])
def test_copied_log_continues_where_the_broker_does_when_its_last_segment_is_empty(torn: bytes):
    """The folder was that of a broker, which began a segment and was replaced. The other one had
    room for its next record in the segment before, or began the same segment.
    """
    segments = broker_log(60)
    bases = sorted(segments)
    for base, cut in ((bases[-2], 100), (bases[-1], 0)):
        disk = SimDisk()
        log = CopiedLog(disk)
        log.begin(0)
        for each in [each for each in bases if each < base or cut]:
            if each <= base:
                log.append(each, segments[each])
        (*_, record) = [position for position in log.last_positions() if position < log.end]
        if cut:
            log.cut(record)
        end = log.end
        log.close()
        file = disk.open_append(segment_path(end))
        file.append([torn])
        file.fdatasync()
        file.close()
        disk.sync_folder("log")
        again = CopiedLog(disk)
        assert (again.end, again.has_lost_bytes) == (end, False)
        segment = base
        again.append(segment, segments[segment][end - segment :])
        again.close()
        kept = [each for each in bases if each <= base]
        assert copied_segments(disk, kept) == {each: segments[each] for each in kept}


def test_copied_log_removes_segments_from_the_oldest_on():
    segments = broker_log(60)
    bases = sorted(segments)
    disk = SimDisk()
    log = CopiedLog(disk)
    log.begin(0)
    for base in bases:
        log.append(base, segments[base])
    log.remove_before(bases[2])
    assert log.first_position == bases[2]
    assert [base for base in bases if disk.size(segment_path(base)) is not None] == bases[2:]
    log.clear()
    assert (log.end, log.first_position, disk.list("log")) == (-1, -1, [])


def test_tail_reaches_over_the_last_commit_and_some_bytes_before():
    """The last commit begins at the newest record with BARRIER; here it has one record."""
    segments = broker_log(60)
    bases = sorted(segments)
    whole = b"".join(segments[base] for base in bases)
    disk = SimDisk()
    log = CopiedLog(disk)
    log.begin(0)
    for base in bases:
        log.append(base, segments[base])
    for each in (log, CopiedLog(disk)):
        last, end = each.last_positions()
        assert end == len(whole)
        for position in (last, end):
            start, _, crc = each.tail(position, -1)
            assert start == last - COMPARED_BYTES
            assert crc == crc32c.crc32c(whole[start:position])
        assert each.tail(end, last - 10).start == last - 10


def test_last_positions_reach_over_segments_when_a_commit_does():
    plan = WritePlan(base=0, end=0, segment_bytes=SEGMENT_BYTES)
    begins = [
        plan.add(batch(value=b"v" * 700), base_offset=number, appended_at_ms=1)[0]
        for number in range(30)
    ]
    disk = SimDisk()
    log = CopiedLog(disk)
    log.begin(0)
    for base, buffers in plan.chunks:
        log.append(base, b"".join(buffers))
    assert len(plan.chunks) > 2
    assert log.last_positions() == CopiedLog(disk).last_positions() == [*begins, plan.end]
    log.cut(begins[9])
    assert log.last_positions() == CopiedLog(disk).last_positions() == begins[:10]


def test_copied_log_has_lost_nothing_when_it_was_cut():
    """Its trail names no record that was cut: a start would look for it."""
    segments = broker_log(40)
    disk = SimDisk()
    log = CopiedLog(disk)
    log.begin(0)
    for base, data in sorted(segments.items()):
        log.append(base, data)
    log.close()
    log = CopiedLog(disk)
    begin, _end = log.last_positions()
    log.cut(begin)
    again = CopiedLog(disk)
    assert (again.end, again.has_lost_bytes) == (begin, False)
