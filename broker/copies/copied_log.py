"""The log in the folder of a copy: bytes of a broker's log, appended as they come. Does disk I/O
through `Files`.

    bytes of a segment ─▶ appended, synced ─▶ their records are added to the trail
    a later segment    ─▶ the one before it is protected, as the broker does
    the broker's first position rises ─▶ segments before it are removed, oldest first
    the broker lost what was not durable ─▶ cut to what both have

Invariants
    The log is a prefix of the broker's log above its first position, byte for byte; a crash leaves
    a shorter one. Bytes are appended only where the log ends. A record is verified before it
    is added to the trail; bytes that are no record, because the broker's log is damaged there, are
    kept as they are.
"""

from __future__ import annotations

import logging
from itertools import pairwise
from typing import NamedTuple

import crc32c

from ...protocol.errors import StorageError
from ...protocol.record import HEADER_BYTES, MAGIC, Header, IncompleteRecord, read_record
from ..storage.append_file import Buffer
from ..storage.files import READ_BYTES, AppendFile, Files
from ..storage.log.commit_log import BARRIER, FOLDER, segment_bases, segment_path
from ..storage.log.holes import Hole
from ..storage.log.recovery import intact_records, recover_log
from ..storage.log.trail import TrailWriter, trail_bases, trail_bytes, trail_path

log = logging.getLogger("keylane.broker")

_MAGIC_BYTES = MAGIC.to_bytes(4, "little")
_NO_BODY = memoryview(b"")
COMPARED_BYTES = 4096
"""How many bytes before the last positions are compared: they show that it is the same log."""


class Tail(NamedTuple):
    """The last bytes of a copy's log, which its broker compares with its own."""

    start: int
    position: int
    """Their end."""
    crc: int
    """Their CRC-32C."""


class _Positions:
    """The positions of the newest record with BARRIER and of those after it: the records of a copy
    are applied when it is promoted.
    """

    def __init__(self) -> None:
        self.since_barrier: list[int] = []
        self.has_barrier = False
        """False if they may begin before the records that were seen."""

    def on_record(self, header: Header, _body: memoryview = _NO_BODY) -> None:
        """See `Visitor`."""
        if header.flags & BARRIER:
            self.since_barrier.clear()
            self.has_barrier = True
        self.since_barrier.append(header.position)

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
        self._positions = _Positions()
        self.has_lost_bytes = False
        """True if the folder lacks bytes that it had synced."""
        if self._bases:
            self._recover()
        if len(self._bases) > 1 and self.segment == self.end and not self.has_lost_bytes:
            # A broker began it, and has stored nothing there: another one may continue before it.
            self.cut(self.end)

    def _recover(self) -> None:
        """Cut what a crash has left unfinished: above the trail, no byte is known to be synced."""
        recovered = recover_log(
            self._files, self._positions, start=self._bases[-1], trusts_barriers=False
        )
        self.has_lost_bytes = recovered.bases != self._bases or any(
            self._files.size(segment_path(base)) != following - base
            for base, following in pairwise(self._bases)
        )
        self._bases, self.end = recovered.bases, recovered.end
        for base in reversed(self._bases[:-1]):
            if self._positions.has_barrier:
                return
            later, self._positions = self._positions.since_barrier, _Positions()
            for header in intact_records(self._files, base, base):
                self._positions.on_record(header)
            self._positions.since_barrier += later

    @property
    def bases(self) -> tuple[int, ...]:
        """The positions at which the segments begin."""
        return tuple(self._bases)

    @property
    def segment(self) -> int:
        """The position at which the last segment begins."""
        return self._bases[-1] if self._bases else -1

    @property
    def whole_end(self) -> int:
        """The end of the last record that has come as a whole."""
        return self.end - len(self._unparsed)

    @property
    def barrier_position(self) -> int:
        """The position of the newest record with BARRIER, before which nothing is ever cut; the
        first position if there is none.
        """
        since_barrier = self._positions.since_barrier
        return since_barrier[0] if since_barrier else self.first_position

    def last_positions(self) -> list[int]:
        """
        Return the positions at which the log may differ from its broker's, and its end.

        The first one is that of the newest record with BARRIER: all bytes before it were durable at
        the broker and at every copy that acks waited for. Each later one begins a record.
        """
        return [*self._positions.since_barrier, self.end]

    def tail(self, position: int, first_position: int) -> Tail:
        """
        Return the bytes before one of the last positions that are to be compared.

        Args:
            first_position: where the broker's log begins, as far as that is known.
        """
        lowest = max(first_position, self.first_position)
        start = min(position, max(lowest, self.last_positions()[0] - COMPARED_BYTES))
        crc = 0
        for base, end in pairwise([*self._bases, self.end]):
            at, last = max(base, start), min(end, position)
            while at < last:
                length = min(last - at, READ_BYTES)
                data = self._files.pread(segment_path(base), at - base, length)
                crc = crc32c.crc32c(data, crc)
                at += length
        return Tail(start, position, crc)

    def cut(self, position: int) -> None:
        """
        Remove what follows a position, at which a record begins, durably.

        A crash leaves a log that ends later. The trail of the segment is started over, because it
        must not name what is cut. Raises StorageError.
        """
        self.close()
        kept = [base for base in self._bases if base < position] or self._bases[:1]
        for base in trail_bases(self._files):
            if base >= kept[-1]:
                self._files.remove(trail_path(base))
        self._files.sync_folder(FOLDER)
        for base in reversed(self._bases[len(kept) :]):
            self._files.remove(segment_path(base))
            self._files.sync_folder(FOLDER)
        self._files.unprotect(segment_path(kept[-1]))
        file = self._files.open_append(segment_path(kept[-1]))
        try:
            file.truncate(position - kept[-1])
            file.fdatasync()
        finally:
            file.close()
        self._bases, self.end = kept, position
        since_barrier = self._positions.since_barrier
        since_barrier[:] = [each for each in since_barrier if each < position]

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
                self._positions.on_record(header)
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
        self._positions = _Positions()

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
