"""What recovery makes of bytes that are no record: a hole where they were durable, a cut where they
never were.
"""

from __future__ import annotations

import pytest

from keylane.broker.storage.log.commit_log import FOLDER, WritePlan, segment_path
from keylane.broker.storage.log.holes import Hole
from keylane.broker.storage.log.recovery import recover_log, scan_log
from keylane.protocol.errors import DataFolderError
from keylane.protocol.record import Header
from keylane.testing.machines.disk import SimDisk
from sim.machines.store import batch

RECORD = batch()
LENGTH = len(RECORD)
LARGE = 1 << 20


class Visits:
    """The positions of the records and the holes that recovery reported."""

    def __init__(self) -> None:
        self.records: list[int] = []
        self.holes: list[tuple[int, int]] = []

    def on_record(self, header: Header, body: memoryview) -> None:
        self.records.append(header.position)

    def on_hole(self, hole: Hole) -> None:
        self.holes.append((hole.start, hole.end))


def log_of(*commits: int, segment_bytes: int = LARGE) -> dict[int, bytearray]:
    """The segments, by base, of commits with these numbers of records; only barriers tell how far
    they are durable.
    """
    segments: dict[int, bytearray] = {}
    base = end = 0
    for count in commits:
        plan = WritePlan(base=base, end=end, segment_bytes=segment_bytes)
        for _ in range(count):
            plan.add(RECORD, base_offset=0, appended_at_ms=0)
        for base, buffers in plan.chunks:
            segments.setdefault(base, bytearray()).extend(b"".join(buffers))
        end = plan.end
    return segments


def disk_with(segments: dict[int, bytearray]) -> SimDisk:
    disk = SimDisk()
    disk.make_folder(FOLDER)
    for base, data in segments.items():
        file = disk.open_append(segment_path(base))
        file.append([bytes(data)])
        file.fdatasync()
        file.close()
    return disk


def spoil(segments: dict[int, bytearray], record: int, *, base: int = 0) -> None:
    """Flip a bit in the body of the record with this number in its segment."""
    segments[base][(record + 1) * LENGTH - 1] ^= 1


def test_damage_is_cut_when_no_barrier_follows():
    """The commit with the damaged record never became durable, so no record behind the damage is
    kept either.
    """
    segments = log_of(3)
    spoil(segments, 1)
    visits = Visits()
    recovered = scan_log(disk_with(segments), visits)
    assert (recovered.end, recovered.cut_bytes) == (LENGTH, 2 * LENGTH)
    assert (visits.records, visits.holes) == ([0], [])


def with_zeros(segments: dict[int, bytearray], count: int = 4_000_000) -> SimDisk:
    """The last segment has reserved bytes behind its end, more than recovery reads at once."""
    segments[max(segments)].extend(bytes(count))
    return disk_with(segments)


def test_reserved_bytes_are_cut_and_are_no_unfinished_write():
    """They end the log; the file is cut there, so that the next record follows the last one."""
    disk = with_zeros(log_of(2, 1))
    scanned = scan_log(disk, Visits())
    assert (scanned.end, scanned.cut_bytes, scanned.reserved_bytes) == (3 * LENGTH, 0, 4_000_000)
    visits = Visits()
    recovered = recover_log(disk, visits)
    assert recovered == scanned
    assert (visits.records, visits.holes) == ([0, LENGTH, 2 * LENGTH], [])
    assert disk.size(segment_path(0)) == 3 * LENGTH
    assert not disk.list()[1:]  # nothing is kept of what was cut


def test_unfinished_write_ends_with_its_last_byte_before_reserved_ones():
    """A commit of which a block is missing is cut with the zeros behind it, and only its own bytes
    are told.
    """
    segments = log_of(1, 2)
    spoil(segments, 1)
    visits = Visits()
    recovered = recover_log(with_zeros(segments), visits)
    assert (recovered.end, visits.records, visits.holes) == (LENGTH, [0], [])
    assert recovered.cut_bytes == 2 * LENGTH
    assert recovered.reserved_bytes == 4_000_000


def test_durable_end_that_became_zeros_is_a_hole():
    """A snapshot knows of two records more than there are: their bytes are lost, and not cut as
    reserved ones.
    """
    visits = Visits()
    recovered = recover_log(with_zeros(log_of(1)), visits, durable=3 * LENGTH)
    assert (recovered.end, visits.records) == (3 * LENGTH, [0])
    assert visits.holes == [(LENGTH, 3 * LENGTH)]
    assert (recovered.bases, recovered.reserved_bytes) == ([0], 4_000_000 - 2 * LENGTH)


def test_damage_is_a_hole_when_a_barrier_follows():
    """A later commit began after the damaged one was durable."""
    segments = log_of(2, 1)
    spoil(segments, 1)
    visits = Visits()
    recovered = scan_log(disk_with(segments), visits)
    assert (recovered.end, recovered.cut_bytes) == (3 * LENGTH, 0)
    assert (visits.records, visits.holes) == ([0, 2 * LENGTH], [(LENGTH, 2 * LENGTH)])
    assert recovered.maybe_unsynced_from == 2 * LENGTH


def test_damage_is_a_hole_when_a_durable_record_follows():
    """A snapshot knows that the log was durable up to its end."""
    segments = log_of(3)
    spoil(segments, 1)
    visits = Visits()
    recovered = scan_log(disk_with(segments), visits, durable=3 * LENGTH)
    assert (recovered.end, recovered.cut_bytes) == (3 * LENGTH, 0)
    assert (visits.records, visits.holes) == ([0, 2 * LENGTH], [(LENGTH, 2 * LENGTH)])


def test_damage_is_a_hole_when_it_is_in_an_earlier_segment():
    """Its last record too, behind which no record of the segment follows."""
    segments = log_of(4, segment_bytes=2 * LENGTH)
    spoil(segments, 1)
    visits = Visits()
    recovered = scan_log(disk_with(segments), visits)
    assert recovered.bases == [0, 2 * LENGTH]
    assert visits.records == [0, 2 * LENGTH, 3 * LENGTH]
    assert visits.holes == [(LENGTH, 2 * LENGTH)]


def test_new_segment_begins_when_durable_bytes_are_missing_at_the_end():
    """No record is written where a durable one was."""
    segments = log_of(3)
    del segments[0][LENGTH:]
    visits = Visits()
    recovered = scan_log(disk_with(segments), visits, durable=3 * LENGTH)
    assert (recovered.bases, recovered.end) == ([0, 3 * LENGTH], 3 * LENGTH)
    assert (visits.records, visits.holes) == ([0], [(LENGTH, 3 * LENGTH)])


def test_recovery_starts_at_the_given_position():
    """Records below the start are in the snapshot: they are neither visited nor checked."""
    segments = log_of(3)
    spoil(segments, 0)
    visits = Visits()
    assert scan_log(disk_with(segments), visits, start=LENGTH).end == 3 * LENGTH
    assert (visits.records, visits.holes) == ([LENGTH, 2 * LENGTH], [])


def test_whole_records_are_kept_in_a_file_when_they_are_cut():
    """The scan changes nothing; recovery cuts the segment, and the cut bytes lie beside it."""
    segments = log_of(3)
    spoil(segments, 1)
    disk = disk_with(segments)
    scan_log(disk, Visits())
    assert disk.size(segment_path(0)) == 3 * LENGTH
    recover_log(disk, Visits())
    assert disk.size(segment_path(0)) == LENGTH
    kept = disk.pread(f"cut-{LENGTH:020d}.bin", 0, LARGE)
    assert bytes(kept) == bytes(segments[0][LENGTH:])


def test_whole_records_of_an_unfinished_write_are_kept_without_reserved_bytes():
    """The file beside the log is as long as what was written."""
    segments = log_of(3)
    spoil(segments, 1)
    written = bytes(segments[0][LENGTH:])
    disk = with_zeros(segments)
    recover_log(disk, Visits())
    assert disk.pread(f"cut-{LENGTH:020d}.bin", 0, LARGE) == written


def test_log_is_refused_when_its_segments_are_gone():
    """A snapshot says how far the log reached: an empty folder is not taken for a new log."""
    with pytest.raises(DataFolderError, match="no segments"):
        scan_log(disk_with({}), Visits(), start=LENGTH)


def test_last_segment_is_refused_when_it_is_of_another_log():
    """It begins behind the end of the log, and has no whole record of that position."""
    segments = log_of(1) | {5 * LENGTH: bytearray(RECORD)}
    with pytest.raises(DataFolderError, match="does not belong to the log"):
        scan_log(disk_with(segments), Visits())
