"""The trail of a segment: a list of its durable records, without messages. Does disk I/O through
`Files`.

    log/{position}.trail      the records' headers of 96 bytes, as in the log;
                              small records that are not batches also have their bodies

The trail is a separate file, so it is not affected by damage to the log. It shows which records a
damaged region contained, restores those that are not batches, and proves that a missing tail had
become durable. A record is added to the trail after the log is synced. The trail itself is not
synced: if entries are missing, recovery is merely more cautious.

Invariants
    Every record in the trail was durable in the log. Entries with a wrong checksum or position are
    ignored.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence

from ....protocol.errors import StorageError
from ....protocol.record import HEADER_BYTES, MAGIC, Header, Kind, read_header, read_record
from ..append_file import Buffer
from ..files import AppendFile, Files, file_numbers
from .holes import TrailEntry

log = logging.getLogger("keylane.broker")

SUFFIX = ".trail"
WHOLE_RECORD_BYTES_MAX = 4096
"""The maximum length, in bytes, of a record that the trail keeps as a whole. A cursor with
thousands of ranges is longer.
"""
READ_BYTES = 4 << 20
_CONTENT = (Kind.MESSAGES, Kind.SCHEDULED)
"""The kinds of records that contain messages, which the trail does not repeat."""
_MAGIC_BYTES = MAGIC.to_bytes(4, "little")


def trail_path(base: int) -> str:
    """Return the path of the trail of the segment that begins at position `base`."""
    return f"log/{base:020d}{SUFFIX}"


def trail_bases(files: Files) -> list[int]:
    """Return the sorted bases of the segments that have a trail. The segments themselves may be
    missing.
    """
    return file_numbers(files.list("log"), digits=20, suffix=SUFFIX)


def trail_bytes(kind: int, length: int) -> int:
    """Return the number of bytes that the trail keeps of a record of `length` bytes."""
    return HEADER_BYTES if kind in _CONTENT or length > WHOLE_RECORD_BYTES_MAX else length


class TrailWriter:
    """Writes trails. If a write fails, only the trail of that segment ends."""

    def __init__(self, files: Files) -> None:
        self._files = files
        self._base = -1
        self._file: AppendFile | None = None

    def add(self, base: int, pieces: Sequence[Buffer]) -> None:
        """Add records that have become durable in the segment at `base`."""
        try:
            if base != self._base:
                self.close()
                self._base = base
                self._file = self._files.open_append(trail_path(base))
            if self._file is not None:
                self._file.append(pieces)
        except StorageError as error:
            log.warning("cannot write the trail of the log: %s", error.message)
            self._end_file()

    def _end_file(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def close(self) -> None:
        """Close the file."""
        self._end_file()
        self._base = -1


class TrailCursor:
    """Reads the trail of a segment region by region. If the regions are requested in order, a
    single pass is enough.
    """

    def __init__(self, files: Files, base: int) -> None:
        self._files = files
        self._base = base
        self._entries: Iterator[TrailEntry] | None = None
        self._pushed_back: TrailEntry | None = None
        self._read_until = 0

    def entries_between(self, start: int, end: int) -> Iterator[TrailEntry]:
        """Yield the entries of records that begin in `[start, end)`, in the order of the log."""
        if self._entries is None or start < self._read_until:
            self._entries = _read_entries(self._files, self._base, 0)
            self._pushed_back = None
        self._read_until = end
        while True:
            entry = self._pushed_back or next(self._entries, None)
            self._pushed_back = None
            if entry is None:
                return
            if entry.header.position >= end:
                self._pushed_back = entry
                return
            if entry.header.position >= start:
                yield entry


def durable_end(files: Files, base: int) -> int:
    """Return the position up to which the trail proves that the segment was durable, or `base` if
    there is no trail.
    """
    size = files.size(trail_path(base)) or 0
    end = base
    for entry in _read_entries(files, base, max(0, size - 4 * WHOLE_RECORD_BYTES_MAX)):
        end = max(end, entry.header.position + entry.header.length)
    return end


def _read_entries(files: Files, base: int, position: int) -> Iterator[TrailEntry]:
    """Yield the entries of a trail from byte `position` on, skipping bytes that are not an
    entry.
    """
    path = trail_path(base)
    size = files.size(path) or 0
    while position < size:
        data = files.pread(path, position, READ_BYTES + WHOLE_RECORD_BYTES_MAX)
        start = data.find(_MAGIC_BYTES)
        while 0 <= start < READ_BYTES:
            entry = _parse_entry(data, start)
            if entry is not None and entry.header.position >= base:
                yield entry
                start += trail_bytes(entry.header.kind, entry.header.length)
                if data[start : start + 4] == _MAGIC_BYTES:
                    continue
            else:
                start += 1
            start = data.find(_MAGIC_BYTES, start)
        position += READ_BYTES if start < 0 else max(start, 1)


def _parse_entry(data: bytes, start: int) -> TrailEntry | None:
    """Return the entry at `start`, or None if its checksum is wrong or it is incomplete."""
    header = read_header(data, start)
    if not isinstance(header, Header):
        return None
    if trail_bytes(header.kind, header.length) == HEADER_BYTES < header.length:
        return TrailEntry(header, None)
    if not isinstance(read_record(data, start), Header):
        return None
    return TrailEntry(header, data[start + HEADER_BYTES : start + header.length])
