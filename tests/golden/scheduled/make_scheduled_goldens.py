"""Writes the golden files of the journal of scheduled messages anew: `python
tests/golden/scheduled/make_scheduled_goldens.py`.

A change of a file is a change of what is stored on disks: a decision, never a repair of a test.
"""

from __future__ import annotations

import json
from pathlib import Path

from keylane.broker.scheduled.journal import ScheduledJournal, segment_path
from keylane.broker.scheduled.records import (
    Canceled,
    Delivered,
    DroppedMessages,
    Record,
    ScheduledForSubject,
    ScheduledMessageRecord,
    Taken,
)
from keylane.protocol.message import pack_properties
from keylane.testing.machines.disk import SimDisk

FILE = Path(__file__).parent / "scheduled_v1.json"
A, B, C = (bytes([first, *range(15)]) for first in b"abc")
FRAMES: list[list[Record]] = [
    [
        ScheduledMessageRecord(
            A, 1_800_000_000_123, "orders", 1_700_000_000_000_000_001, b"later", b""
        ),
        ScheduledMessageRecord(
            B, 2**40, "orders", 2**60, b"\x00\xff", pack_properties({"trace": "9"})
        ),
    ],
    [ScheduledMessageRecord(C, 1_800_000_000_124, "other", 0, b"", b""), Canceled(C)],
    [Taken("scheduled-17", "orders", 1023, (A, B))],
    [Delivered("scheduled-17", (A, B))],
]

FILE_2 = Path(__file__).parent / "scheduled_v2.json"
FRAMES_2: list[list[Record]] = [
    [
        ScheduledForSubject(
            A, 1_800_000_000_123, "orders", 1_700_000_000_000_000_001, b"later", b"", 7
        ),
        ScheduledMessageRecord(B, 2**40, "orders", 2**60, b"\x00\xff", b""),
    ],
    [Canceled(B)],
    [DroppedMessages((A,))],
]
"""With records of the second format; a frame without them is of the first."""
FILES = {FILE: FRAMES, FILE_2: FRAMES_2}


def journal_files(frames: list[list[Record]]) -> dict[str, bytes]:
    """The segments of a journal of these frames, by path."""
    disk = SimDisk()
    journal = ScheduledJournal.open(disk, lambda _place, _records: None, segment_bytes=256)
    for records in frames:
        journal.append(records)
    paths = [segment_path(segment) for segment in journal.segments]
    return {path: disk.pread(path, 0, disk.size(path) or 0) for path in paths}


def main() -> None:
    """Write the files."""
    for file, frames in FILES.items():
        files = journal_files(frames)
        lines = {path: data.hex(" ", -32).split(" ") for path, data in files.items()}
        file.write_text(json.dumps(lines, indent=1) + "\n")


if __name__ == "__main__":
    main()
