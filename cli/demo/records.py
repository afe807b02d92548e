"""The file in which a demo consumer records the messages that it handled, one per line.

tail number,row,partition,offset,fencing token,boot-time milliseconds
"""

from __future__ import annotations

from pathlib import Path

from .history import Record


def encode_record(record: Record) -> bytes:
    """Encode a record as one line."""
    key, row, partition_id, offset, token, at_ms = record
    return b"%b,%d,%d,%d,%d,%d\n" % (key, row, partition_id, offset, token, at_ms)


def parse_records(data: bytes) -> list[Record]:
    """Parse the complete lines of `data`. A partial last line is ignored, because its message was
    never acked.
    """
    complete_lines = data[: data.rfind(b"\n") + 1]
    return [
        Record(key, int(row), int(partition_id), int(offset), int(token), int(at_ms))
        for key, row, partition_id, offset, token, at_ms in (
            line.rsplit(b",", 5) for line in complete_lines.splitlines()
        )
    ]


class RecordTail:
    """Reads a consumer's file as it grows."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.records: list[Record] = []
        """The records read so far."""
        self.first_at_ms: dict[tuple[int, int], int] = {}
        """Maps each (partition id, token) to the time of its first record, in milliseconds since
        boot.
        """
        self._read_bytes = 0

    def poll(self) -> None:
        """Read the lines that have been appended since the last call."""
        try:
            with self.path.open("rb") as file:
                file.seek(self._read_bytes)
                data = file.read()
        except FileNotFoundError:
            return
        new_records = parse_records(data)
        self._read_bytes += data.rfind(b"\n") + 1
        self.records += new_records
        for record in new_records:
            self.first_at_ms.setdefault((record.partition_id, record.token), record.at_ms)
