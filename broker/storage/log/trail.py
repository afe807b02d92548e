"""The trail of a segment: its durable records without their messages. Disk, through `Files`.

    log/{position}.trail      headers of 96 bytes as they are in the log, one after another;
                              records that are not messages have their bodies as well, up to
                              OWN_BYTES_MAX

The trail is a file of its own, so damage of the log does not affect it. It shows which records a
damaged region had, restores those that are not messages, and proves that a missing tail was durable
once. A record is added to the trail after the sync of the log. The trail itself is not synced: if
some or all of its entries are missing, recovery is only more cautious.

Invariants
    Every record in the trail was durable in the log. An entry counts only if its checksum and
    position are right.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence

from ....protocol.errors import StorageError
from ....protocol.record import HEADER_BYTES, MAGIC, Header, Kind, read_header, read_record
from ..append_file import Buffer
from ..files import AppendFile, Files
from .holes import Trace

log = logging.getLogger("keylane.broker")

SUFFIX = ".trail"
OWN_BYTES_MAX = 4096
"""The length in bytes above which the trail has only the header of a record, such as a cursor with
thousands of ranges.
"""
READ_BYTES = 4 << 20
_MAGIC_BYTES = MAGIC.to_bytes(4, "little")


def trail_path(base: int) -> str:
    """Return the path of the trail of the segment that begins at position `base`."""
    return f"log/{base:020d}{SUFFIX}"


def trail_bases(files: Files) -> list[int]:
    """Return the positions at which segments with a trail begin, sorted. The segment itself may be
    missing.
    """
    return [
        int(name[:20])
        for name in files.list("log")
        if len(name) == 20 + len(SUFFIX)
        and name.endswith(SUFFIX)
        and name[:20].isascii()
        and name[:20].isdecimal()
    ]


def bytes_kept(kind: int, length: int) -> int:
    """Return the number of bytes that the trail keeps of a record of `length` bytes."""
    return HEADER_BYTES if kind == Kind.MESSAGES or length > OWN_BYTES_MAX else length


class TrailWriter:
    """Writes trails. A failed write ends the trail of that segment, and nothing else."""

    def __init__(self, files: Files) -> None:
        self._files = files
        self._base = -1
        self._file: AppendFile | None = None

    def add(self, base: int, pieces: Sequence[Buffer]) -> None:
        """Add records that have become durable in the segment that begins at `base`."""
        try:
            if base != self._base:
                self.close()
                self._base = base
                self._file = self._files.open_append(trail_path(base))
            if self._file is not None:
                self._file.append(pieces)
        except StorageError as error:
            log.warning("the log's trail has a gap: %s", error.message)
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
    """Reads the trail of a segment once for any number of regions that are requested in order."""

    def __init__(self, files: Files, base: int) -> None:
        self._files = files
        self._base = base
        self._traces: Iterator[Trace] | None = None
        self._next: Trace | None = None
        self._passed = 0

    def between(self, start: int, end: int) -> Iterator[Trace]:
        """Yield the records in the trail that begin in `[start, end)`, in the order of the log."""
        if self._traces is None or start < self._passed:
            self._traces = _traces(self._files, self._base, 0)
            self._next = None
        self._passed = end
        while True:
            trace = self._next or next(self._traces, None)
            self._next = None
            if trace is None:
                return
            if trace.header.position >= end:
                self._next = trace
                return
            if trace.header.position >= start:
                yield trace


def durable_end(files: Files, base: int) -> int:
    """Return the position up to which the segment was durable according to its trail, or `base` if
    it has none.
    """
    size = files.size(trail_path(base)) or 0
    last = base
    for trace in _traces(files, base, max(0, size - 4 * OWN_BYTES_MAX)):
        last = max(last, trace.header.position + trace.header.length)
    return last


def _traces(files: Files, base: int, at: int) -> Iterator[Trace]:
    """Yield the entries from byte `at` of the trail on. Bytes that are not an entry are skipped."""
    path = trail_path(base)
    size = files.size(path) or 0
    while at < size:
        data = files.pread(path, at, READ_BYTES + OWN_BYTES_MAX)
        start = data.find(_MAGIC_BYTES)
        while 0 <= start < READ_BYTES:
            trace = _trace(data, start)
            if trace is not None and trace.header.position >= base:
                yield trace
                start += bytes_kept(trace.header.kind, trace.header.length)
                if data[start : start + 4] == _MAGIC_BYTES:
                    continue
            else:
                start += 1
            start = data.find(_MAGIC_BYTES, start)
        at += READ_BYTES if start < 0 else max(start, 1)


def _trace(data: bytes, start: int) -> Trace | None:
    header = read_header(data, start)
    if not isinstance(header, Header):
        return None
    if bytes_kept(header.kind, header.length) == HEADER_BYTES < header.length:
        return Trace(header, None)
    if not isinstance(read_record(data, start), Header):
        return None
    return Trace(header, data[start + HEADER_BYTES : start + header.length])
