"""The file in which a consumer of the demo writes down what it handled, one line a message.

tail number,row,partition,offset,fencing token,boot-time milliseconds
"""

from __future__ import annotations

from pathlib import Path

from .history import Record


def encode_record(record: Record) -> bytes:
    """A record as its line."""
    key, row, partition_id, offset, token, at_ms = record
    return b"%b,%d,%d,%d,%d,%d\n" % (key, row, partition_id, offset, token, at_ms)


def parse_records(data: bytes) -> list[Record]:
    """The whole lines of `data`; a last line cut short was never acked and is left out."""
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
        """Every whole line so far."""
        self.first_at_ms: dict[tuple[int, int], int] = {}
        """(partition id, token) → when its first record was written, boot-time milliseconds."""
        self._read = 0

    def poll(self) -> None:
        """Take in what was added since the last time."""
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
