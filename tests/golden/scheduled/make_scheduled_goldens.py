"""Writes the golden file of scheduled messages in the log: `python
tests/golden/scheduled/make_scheduled_goldens.py`. Those of the journal of version 0.2, of which the
changes are here too, are written no more.

A change of a file is a change of what is stored on disks: a decision, never a repair of a test.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

from keylane.broker.scheduled.agenda import PATH, ScheduledAgenda
from keylane.broker.scheduled.records import (
    Canceled,
    Delivered,
    DroppedMessages,
    Place,
    Record,
    ScheduledForSubject,
    ScheduledMessageRecord,
    Taken,
    encode_records,
)
from keylane.protocol.message import pack_properties
from keylane.testing.machines.disk import SimDisk
from sim.machines.clock import ManualClock

HERE = Path(__file__).parent
A, B, C = (bytes([first, *range(15)]) for first in b"abc")
FIRST: list[list[Record]] = [
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
SECOND: list[list[Record]] = [
    [
        ScheduledForSubject(
            A, 1_800_000_000_123, "orders", 1_700_000_000_000_000_001, b"later", b"", 7
        ),
        ScheduledMessageRecord(B, 2**40, "orders", 2**60, b"\x00\xff", b""),
    ],
    [Canceled(B)],
    [DroppedMessages((A,))],
]
JOURNALS = {HERE / "scheduled_v1.json": FIRST, HERE / "scheduled_v2.json": SECOND}
"""The journal of version 0.2 in its two formats."""
LOG = HERE / "scheduled_records_v1.json"
"""Records of the log, and the copy of the index that they lead to without the last one."""


def log_records() -> list[bytes]:
    return [record.data for each in (*FIRST, *SECOND) for record in encode_records(each)]


def copy_file() -> bytes:
    """The copy of an index with a message, an open delivery and settled messages."""
    disk = SimDisk()
    agenda = ScheduledAgenda(disk, ManualClock())
    for position, changes in enumerate([*SECOND[:2], *FIRST[1:3]]):
        for change in changes:
            agenda.index.replay(change, Place(100 * position, 90))
    agenda.save(asyncio.run(agenda.images()), position=400)
    return disk.pread(PATH, 0, disk.size(PATH) or 0)


def main() -> None:
    """Write the file."""
    files = {"records": log_records(), PATH: [copy_file()]}
    lines = {
        name: [data.hex(" ", -32).split(" ") for data in pieces] for name, pieces in files.items()
    }
    LOG.write_text(json.dumps(lines, indent=1) + "\n")


if __name__ == "__main__":
    main()
