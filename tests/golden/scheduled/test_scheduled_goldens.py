"""Scheduled messages, byte for byte: in the log, in the copy of their index, and in the journal of
version 0.2, which every later version reads.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path

import msgspec
import pytest

from golden.scheduled.make_scheduled_goldens import (
    FIRST,
    HERE,
    JOURNALS,
    LOG,
    SECOND,
    A,
    C,
    copy_file,
    log_records,
)
from keylane.broker.scheduled.agenda import PATH, ScheduledAgenda
from keylane.broker.scheduled.old_journal import read_journal
from keylane.broker.scheduled.records import Record, decode_changes
from keylane.protocol.record import HEADER_BYTES, Header, Kind, read_record
from keylane.protocol.scheduled.receipt import CancelOutcome
from keylane.testing.machines.disk import disk_of
from sim.machines.clock import ManualClock
from support.old_journal import write_journal

GOLDEN = {
    name: [bytes.fromhex("".join(data)) for data in pieces]
    for name, pieces in json.loads(LOG.read_text()).items()
}


def golden(file: Path) -> dict[str, bytes]:
    lines = json.loads(file.read_text())
    return {path: bytes.fromhex("".join(data)) for path, data in lines.items()}


def test_records_have_their_golden_bytes():
    assert [each.hex(" ", 8) for each in log_records()] == [
        each.hex(" ", 8) for each in GOLDEN["records"]
    ]


def test_golden_records_are_read():
    read: list[list[Record]] = []
    for data in GOLDEN["records"]:
        header = read_record(data)
        assert isinstance(header, Header)
        assert (header.kind, header.partition_id, header.count) == (Kind.SCHEDULED, 0, 0)
        read.append(decode_changes(data[HEADER_BYTES:], 0))
    assert read == [*FIRST, *SECOND]


def test_copy_has_its_golden_bytes():
    assert copy_file().hex(" ", 8) == GOLDEN[PATH][0].hex(" ", 8)


def test_golden_copy_is_read():
    agenda = ScheduledAgenda(disk_of({PATH: GOLDEN[PATH][0]}), ManualClock())
    assert agenda.load(is_expected=True, position=500, first_position=0) == 400
    assert agenda.problem == ""
    assert agenda.index.entries[A].subject_id == 7
    assert agenda.index.cancel(C) is CancelOutcome.CANCELED
    agenda.index.finish_replay()
    assert not agenda.index.deliveries, "one of its messages was canceled"


def test_golden_copy_reads_as_its_drawing_says():
    """Read with nothing but the drawing in docs/FORMATS.md."""
    (data,) = GOLDEN[PATH]
    magic, _, position = struct.unpack_from("<4sIQ", data)
    assert (magic, position) == (b"KSA1", 400)
    images, start = [], 16
    while start < len(data):
        (length,) = struct.unpack_from("<I", data, start)
        images.append(msgspec.msgpack.decode(data[start + 4 : start + 4 + length]))
        start += 4 + length
    assert all(len(image) == 2 for image in images), "an image and problems"
    entries = [entry for (image, _problems) in images for entry in image[0]]
    assert entries == [[A, 1_800_000_000_123, "orders", 107, 0, 90, 7]]


@pytest.mark.parametrize("file", JOURNALS, ids=lambda file: file.stem)
def test_golden_journal_is_read(file: Path):
    read: list[list[Record]] = []
    problems = read_journal(
        disk_of(golden(file)), lambda _segment, _position, more: read.append(more)
    )
    assert read == JOURNALS[file]
    assert problems == []


@pytest.mark.parametrize("file", JOURNALS, ids=lambda file: file.stem)
def test_journals_of_the_tests_are_written_as_version_0_2_did(file: Path):
    disk = disk_of({})
    write_journal(disk, JOURNALS[file], segment_bytes=256)
    known = golden(file)
    assert sorted(f"scheduled/{name}" for name in disk.list("scheduled")) == sorted(known)
    for path, data in known.items():
        assert disk.pread(path, 0, disk.size(path) or 0) == data, path


def test_first_golden_frame_reads_as_its_drawing_says():
    """Read with nothing but the drawing in docs/FORMATS.md."""
    files = golden(HERE / "scheduled_v1.json")
    data = files[min(files)]
    magic, _, length, _, segment, position = struct.unpack_from("<4sIIIQQ", data)
    assert (magic, segment, position) == (b"KLS1", 1, 0)
    assert data[32] == 0x92, "an array of two records"
    assert data[33:37] == b"\x97\x01\xc4\x10", "of seven elements: the kind 1, and 16 bytes"
    assert struct.unpack_from("<4sIIIQQ", data, length)[4:] == (1, length)


def test_frame_is_of_the_second_format_when_one_of_its_records_is():
    files = golden(HERE / "scheduled_v2.json")
    data = files[min(files)]
    magic, _, length = struct.unpack_from("<4sII", data)
    assert (magic, data[33:35]) == (b"KLS2", b"\x98\x05")
    assert data[length : length + 4] == b"KLS1", "a cancel alone is of the first"
