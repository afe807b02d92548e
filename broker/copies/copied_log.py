"""The log in the folder of a copy: bytes of a broker's log, appended as they come. Does disk I/O
through `Files`.

    bytes of a segment ─▶ appended, synced ─▶ their records are added to the trail
    a later segment    ─▶ the one before it is protected, as the broker does
    the broker's first position rises ─▶ segments before it are removed, oldest first

Invariants
    The log is a prefix of the broker's durable log above its first position, byte for byte; a crash
    leaves a shorter one. Bytes are appended only where the log ends. A record is verified before it
    is added to the trail; bytes that are no record, because the broker's log is damaged there, are
    kept as they are.
"""

from __future__ import annotations

import logging

import crc32c

from ...protocol.errors import StorageError
from ...protocol.record import HEADER_BYTES, MAGIC, Header, IncompleteRecord, read_record
from ..storage.append_file import Buffer
from ..storage.files import AppendFile, Files
from ..storage.log.commit_log import FOLDER, segment_bases, segment_path
from ..storage.log.holes import Hole
from ..storage.log.recovery import recover_log
from ..storage.log.trail import TrailWriter, trail_bases, trail_bytes, trail_path

log = logging.getLogger("keylane.broker")

_MAGIC_BYTES = MAGIC.to_bytes(4, "little")
COMPARED_BYTES = 4096
"""How many of the last bytes of a copy's log are compared with the broker's when it connects."""


def tail_start(segment: int, position: int) -> int:
    """Return where the bytes before `position` begin that are compared, in the same segment."""
    return max(segment, position - COMPARED_BYTES)


class _NoVisitor:
    """Looks at nothing: the records of a copy are applied when it is promoted."""

    def on_record(self, header: Header, body: memoryview) -> None:
        """See `Visitor`."""

    def on_hole(self, hole: Hole) -> None:
        """See `Visitor`."""


class CopiedLog:
    """
    The log of a copy.

    Attributes:
        end: the position that follows its last byte; -1 while it has none.
    """

    def __init__(self, files: Files) -> None:
        self._files = files
        self._bases = segment_bases(files)
        self.end = -1
        self._active: AppendFile | None = None
        self._trail = TrailWriter(files)
        self._unparsed = b""
        """The beginning of a record whose rest has not come."""
        self._is_damaged = False
        """True if the segment has bytes that are no record."""
        self.has_lost_end = False
        """True if the folder lacks bytes at its end that it had synced."""
        if self._bases:
            self._recover()

    def _recover(self) -> None:
        """Cut what a crash has left unfinished: above the trail, no byte is known to be synced."""
        recovered = recover_log(
            self._files, _NoVisitor(), start=self._bases[-1], trusts_barriers=False
        )
        self.has_lost_end = recovered.bases != self._bases
        self._bases, self.end = recovered.bases, recovered.end

    @property
    def segment(self) -> int:
        """The position at which the last segment begins."""
        return self._bases[-1] if self._bases else -1

    def tail_crc(self) -> int:
        """Return the CRC-32C of the last bytes; see `Follow.tail_crc`."""
        if self.end < 0:
            return -1
        start = tail_start(self.segment, self.end)
        data = self._files.pread(segment_path(self.segment), start - self.segment, self.end - start)
        return crc32c.crc32c(data)

    @property
    def first_position(self) -> int:
        """The position of the first byte; -1 while there is none."""
        return self._bases[0] if self._bases else -1

    def begin(self, position: int) -> None:
        """Begin an empty log at a position of the broker's, where a segment begins there."""
        assert self.end < 0
        self.end = position

    def append(self, segment: int, data: Buffer) -> None:
        """
        Append bytes at the end, and sync them.

        Args:
            segment: the position of the segment to which they belong, which may be a new one.

        Raises:
            StorageError
        """
        assert self.end >= 0
        file = self._open(segment)
        file.append([data])
        file.fdatasync()
        self.end += len(data)
        self._add_to_trail(segment, bytes(data))

    def _open(self, segment: int) -> AppendFile:
        if self._active is not None and segment == self.segment:
            return self._active
        if self._active is not None:
            self._active.close()
            self._protect(self.segment)
        self._files.make_folder(FOLDER)
        self._active = self._files.open_append(segment_path(segment))
        self._files.sync_folder(FOLDER)
        if segment != self.segment:
            assert segment == self.end
            self._bases.append(segment)
            self._unparsed, self._is_damaged = b"", False
        return self._active

    def _protect(self, segment: int) -> None:
        try:
            self._files.protect(segment_path(segment))
        except StorageError as error:
            log.warning("cannot make a sealed segment read-only: %s", error.message)

    def _add_to_trail(self, segment: int, data: bytes) -> None:
        """Add the records that are complete to the trail."""
        data = self._unparsed + data
        pieces: list[Buffer] = []
        start, base = 0, self.end - len(data)
        while True:
            header = read_record(data, start)
            if isinstance(header, IncompleteRecord):
                break
            if isinstance(header, Header) and header.position == base + start:
                end = start + header.length
                whole = trail_bytes(header.kind, header.length) > HEADER_BYTES
                pieces.append(data[start : end if whole else start + HEADER_BYTES])
                start = end
                continue
            if not self._is_damaged:
                self._is_damaged = True
                log.warning(
                    "the log of the broker is damaged at position %d; it is copied as it is",
                    base + start,
                )
            start = data.find(_MAGIC_BYTES, start + 1)
            if start < 0:
                start = max(0, len(data) - len(_MAGIC_BYTES) + 1)
                break
        self._unparsed = data[start:]
        if pieces:
            self._trail.add(segment, pieces)

    def remove_before(self, first_position: int) -> None:
        """Remove the segments that end at or before a position, oldest first. Raises
        StorageError.
        """
        while len(self._bases) > 1 and self._bases[1] <= first_position:
            self._remove(self._bases[0])
            self._bases = self._bases[1:]

    def clear(self) -> None:
        """Remove everything, oldest first. Raises StorageError."""
        self.close()
        for base in sorted({*self._bases, *trail_bases(self._files)}):
            self._remove(base)
        self._bases, self.end = [], -1

    def _remove(self, base: int) -> None:
        for path in (trail_path(base), segment_path(base)):
            if self._files.size(path) is not None:
                self._files.remove(path)
        self._files.sync_folder(FOLDER)

    def close(self) -> None:
        """Close the files."""
        self._trail.close()
        if self._active is not None:
            self._active.close()
            self._active = None
        self._unparsed, self._is_damaged = b"", False
