"""The journal of scheduled messages, byte for byte: written as it always was, and read by every later version."""

from __future__ import annotations

import json
import struct

from golden.scheduled.make_scheduled_goldens import FILE, FRAMES, journal_files
from keylane.broker.scheduled.journal import ScheduledJournal
from keylane.broker.scheduled.records import Record
from sim.machines.disk import disk_of

GOLDEN = {
    path: bytes.fromhex("".join(lines)) for path, lines in json.loads(FILE.read_text()).items()
}


def test_journal_has_its_golden_bytes():
    files = journal_files()
    assert sorted(files) == sorted(GOLDEN)
    for path, data in GOLDEN.items():
        assert files[path].hex(" ", 8) == data.hex(" ", 8), path


def test_golden_journal_is_read():
    read: list[list[Record]] = []
    journal = ScheduledJournal.open(disk_of(GOLDEN), lambda _place, more: read.append(more))
    assert read == FRAMES
    assert journal.problems == []


def test_first_golden_frame_reads_as_its_drawing_says():
    """Read with nothing but the drawing in docs/FORMATS.md."""
    data = GOLDEN[min(GOLDEN)]
    magic, _, length, _, segment, position = struct.unpack_from("<4sIIIQQ", data)
    assert (magic, segment, position) == (b"KLS1", 1, 0)
    assert data[32] == 0x92, "an array of two records"
    assert data[33:37] == b"\x97\x01\xc4\x10", "of seven elements: the kind 1, and 16 bytes"
    assert struct.unpack_from("<4sIIIQQ", data, length)[4:] == (1, length)
