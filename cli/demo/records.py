"""The file in which a consumer of the demo records the messages that it handled, one per line.

tail number,row,partition,offset,fencing token,boot-time milliseconds
"""

from __future__ import annotations

from pathlib import Path

from .history import Record


def encode_record(record: Record) -> bytes:
    """Return the line of a record."""
    key, row, partition_id, offset, token, at_ms = record
    return b"%b,%d,%d,%d,%d,%d\n" % (key, row, partition_id, offset, token, at_ms)


def parse_records(data: bytes) -> list[Record]:
    """Parse the whole lines of `data`; an incomplete last line was never acked, and is ignored."""
    whole = data[: data.rfind(b"\n") + 1]
    return [
        Record(key, int(row), int(partition_id), int(offset), int(token), int(at_ms))
        for key, row, partition_id, offset, token, at_ms in (
            line.rsplit(b",", 5) for line in whole.splitlines()
        )
    ]


class RecordTail:
    """Follows the file of a consumer while it grows."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.records: list[Record] = []
        """The records of all whole lines so far."""
        self.first_at_ms: dict[tuple[int, int], int] = {}
        """The time of the first record by partition id and token, in boot-time milliseconds."""
        self._read = 0

    def poll(self) -> None:
        """Read the lines that were added since the last call."""
        try:
            with self.path.open("rb") as file:
                file.seek(self._read)
                data = file.read()
        except FileNotFoundError:
            return
        added = parse_records(data)
        self._read += data.rfind(b"\n") + 1
        self.records += added
        for record in added:
            self.first_at_ms.setdefault((record.partition_id, record.token), record.at_ms)
