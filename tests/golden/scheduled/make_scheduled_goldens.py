"""Writes the golden file of the journal of scheduled messages anew: `python tests/golden/scheduled/make_scheduled_goldens.py`.

A change of the file is a change of what is stored on disks: a decision, never a repair of a test.
"""

from __future__ import annotations

import json
from pathlib import Path

from keylane.broker.scheduled.journal import ScheduledJournal, segment_path
from keylane.broker.scheduled.records import Canceled, Delivered, Record, Taken, Waits
from keylane.protocol.message import pack_properties
from sim.machines.disk import SimDisk

FILE = Path(__file__).parent / "scheduled_v1.json"
A, B, C = (bytes([first, *range(15)]) for first in b"abc")
FRAMES: list[list[Record]] = [
    [
        Waits(A, 1_800_000_000_123, "orders", 1_700_000_000_000_000_001, b"later", b""),
        Waits(B, 2**40, "orders", 2**60, b"\x00\xff", pack_properties({"trace": "9"})),
    ],
    [Waits(C, 1_800_000_000_124, "other", 0, b"", b""), Canceled(C)],
    [Taken("scheduled-17", "orders", 1023, (A, B))],
    [Delivered("scheduled-17", (A, B))],
]


def journal_files() -> dict[str, bytes]:
    """The segments of a journal with every kind of record, by path."""
    disk = SimDisk()
    journal = ScheduledJournal.open(disk, lambda _place, _records: None, segment_bytes=256)
    for records in FRAMES:
        journal.append(records)
    paths = [segment_path(segment) for segment in journal.segments]
    return {path: disk.pread(path, 0, disk.size(path) or 0) for path in paths}


def main() -> None:
    """Write the file."""
    lines = {path: data.hex(" ", -32).split(" ") for path, data in journal_files().items()}
    FILE.write_text(json.dumps(lines, indent=1) + "\n")


if __name__ == "__main__":
    main()
