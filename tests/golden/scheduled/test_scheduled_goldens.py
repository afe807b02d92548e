"""The journal of scheduled messages, byte for byte: written as it always was, and read by every
later version.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest

from golden.scheduled.make_scheduled_goldens import FILE, FILE_2, FILES, journal_files
from keylane.broker.scheduled.journal import ScheduledJournal
from keylane.broker.scheduled.records import Record
from keylane.testing.machines.disk import disk_of


def golden(file: Path) -> dict[str, bytes]:
    lines = json.loads(file.read_text())
    return {path: bytes.fromhex("".join(data)) for path, data in lines.items()}


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_journal_has_its_golden_bytes(file: Path):
    files, known = journal_files(FILES[file]), golden(file)
    assert sorted(files) == sorted(known)
    for path, data in known.items():
        assert files[path].hex(" ", 8) == data.hex(" ", 8), path


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_golden_journal_is_read(file: Path):
    read: list[list[Record]] = []
    journal = ScheduledJournal.open(disk_of(golden(file)), lambda _place, more: read.append(more))
    assert read == FILES[file]
    assert journal.problems == []


def test_first_golden_frame_reads_as_its_drawing_says():
    """Read with nothing but the drawing in docs/FORMATS.md."""
    files = golden(FILE)
    data = files[min(files)]
    magic, _, length, _, segment, position = struct.unpack_from("<4sIIIQQ", data)
    assert (magic, segment, position) == (b"KLS1", 1, 0)
    assert data[32] == 0x92, "an array of two records"
    assert data[33:37] == b"\x97\x01\xc4\x10", "of seven elements: the kind 1, and 16 bytes"
    assert struct.unpack_from("<4sIIIQQ", data, length)[4:] == (1, length)


def test_frame_is_of_the_second_format_when_one_of_its_records_is():
    files = golden(FILE_2)
    data = files[min(files)]
    magic, _, length = struct.unpack_from("<4sII", data)
    assert (magic, data[33:35]) == (b"KLS2", b"\x98\x05")
    assert data[length : length + 4] == b"KLS1", "a cancel alone is of the first"
