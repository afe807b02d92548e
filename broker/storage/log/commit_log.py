"""The commit log: all records of a broker, one after another, in segment files. Disk, through
`Files`.

    log/00000000000000000000.log   log/00000000001073741712.log   …
        named by the position of their first byte

    A position is the index of a byte in the whole log. A record lies in one segment. A segment
    begins where the previous one ends. Only where bytes were lost is there a gap, which stays.

Invariants
    Positions only grow. A segment is durable before the next one is created, and is not written
    after that. A record with BARRIER was written when every byte before it was durable. So damage
    before a whole record with BARRIER is damage of durable bytes; damage that no such record
    follows is a commit that never became durable. The body of a record is not copied or changed:
    only its header of 96 bytes is stamped. Segments are removed from the first on. A segment is
    removed only when the previous one is durably gone. The last segment may have zeros after its
    end, which are reserved for small plans; they are cut at the end of the segment, when the log is
    closed, and at a start.
"""

from __future__ import annotations

import logging
from bisect import bisect_left, bisect_right
from collections.abc import Sequence

from ....protocol.errors import CorruptLogError, DiskFullError, FlushFailedError, StorageError
from ....protocol.record import HEADER_BYTES, Kind, stamp
from ..append_file import Buffer
from ..files import AppendFile, Files
from .trail import TrailWriter, bytes_kept, trail_path

log = logging.getLogger("keylane.broker")

FOLDER = "log"
SUFFIX = ".log"
BARRIER = 0x80
RESERVED_BYTES = 1 << 20
"""The number of bytes that are reserved after the end for small plans: syncing a write into
reserved bytes takes two thirds of the time.
"""
SMALL_BYTES_MAX = 64 << 10
"""The most bytes of a small plan: bytes are reserved for it, and the kernel may sync it. Larger
plans need few syncs for their bytes.
"""
_FLAGS_AT = 15
_KIND_AT = 13
_MESSAGES = int(Kind.MESSAGES)


def segment_path(base: int) -> str:
    """Return the path of the segment that begins at position `base`."""
    return f"{FOLDER}/{base:020d}{SUFFIX}"


def segment_bases(files: Files) -> list[int]:
    """Return the positions at which the segments on the disk begin, sorted. Other files in the
    folder are ignored.
    """
    return [
        int(name[:20])
        for name in files.list(FOLDER)
        if len(name) == 20 + len(SUFFIX)
        and name.endswith(SUFFIX)
        and name[:20].isascii()
        and name[:20].isdecimal()
    ]


class WritePlan:
    """The writes of a group commit: places records, rolls segments, stamps headers. Pure."""

    def __init__(self, *, base: int, end: int, segment_bytes: int) -> None:
        self._segment_bytes = segment_bytes
        self._base = base
        self.start = end
        self.end = end
        self._barrier = True
        self._buffers: list[Buffer] = []
        self._traces: list[Buffer] = []
        self.chunks: list[tuple[int, list[Buffer]]] = [(base, self._buffers)]
        """(base of the segment, buffers to write at its end), in the order of writing."""
        self.traces: list[list[Buffer]] = [self._traces]
        """The buffers that are written to the trail of each chunk's segment."""

    def add(
        self, record: Buffer, *, base_offset: int, appended_at_ms: int
    ) -> tuple[int, bytearray]:
        """Place a record, whose buffer must not change until it is written. Return its position and
        its stamped header.
        """
        length = len(record)
        if self.end - self._base + length > self._segment_bytes:
            self.roll()
        position = self.end
        header = bytearray(record[:HEADER_BYTES])
        if self._barrier:
            header[_FLAGS_AT] |= BARRIER
            self._barrier = False
        else:
            header[_FLAGS_AT] &= ~BARRIER
        stamp(header, base_offset=base_offset, position=position, appended_at_ms=appended_at_ms)
        self._buffers.append(header)
        self._traces.append(header)
        if length > HEADER_BYTES:
            body = memoryview(record)[HEADER_BYTES:]
            self._buffers.append(body)
            kind = header[_KIND_AT]
            if kind != _MESSAGES and bytes_kept(kind, length) > HEADER_BYTES:
                self._traces.append(body)
        self.end = position + length
        return position, header

    def roll(self) -> None:
        """Let the next record begin a segment, unless the present one is empty."""
        if self.end == self._base:
            return
        self._base = self.end
        self._buffers = []
        self._traces = []
        self.chunks.append((self._base, self._buffers))
        self.traces.append(self._traces)
        self._barrier = True


class CommitLog:
    """A recovered log. One thread writes it, and many may read it."""

    def __init__(self, files: Files, *, segment_bytes: int, bases: Sequence[int], end: int) -> None:
        self._files = files
        self._segment_bytes = segment_bytes
        self._bases = list(bases) or [end]
        """The list is replaced and never changed, because readers in other threads use it."""
        self._leaving: int | None = None
        """The base of a dropped segment, which is no longer read, and whose files may still
        exist.
        """
        self.end = end
        """The position after the last durable record. After a crash the log is at least this
        long.
        """
        self._active: AppendFile | None = None
        self._reserves = True
        """False if the disk reserved nothing when it was last asked to for the active segment."""
        self._trail = TrailWriter(files)

    @property
    def first_position(self) -> int:
        """The position of the first record that can still be read."""
        return self._bases[0]

    @property
    def leaving(self) -> bool:
        """True if files of a dropped segment may still exist, because removing them failed."""
        return self._leaving is not None

    @property
    def bases(self) -> list[int]:
        """The positions at which the segments begin, sorted. The last segment is the one that is
        being written.
        """
        return list(self._bases)

    def plan(self) -> WritePlan:
        """Return an empty plan. It must be written before the next plan is made."""
        return WritePlan(base=self._bases[-1], end=self.end, segment_bytes=self._segment_bytes)

    def write(self, plan: WritePlan) -> None:
        """
        Write a plan and make it durable.

        Raises:
            DiskFullError: no record of the plan was kept; a later plan may be tried.
            FlushFailedError: the plan's records may or may not be on the disk; the log must not be
                written again.
        """
        assert plan.start == self.end
        sealed: list[int] = []
        try:
            for base, buffers in plan.chunks:
                if not buffers and base <= self._bases[-1]:
                    continue
                if base != self._bases[-1]:
                    sealed.append(self._bases[-1])
                file = self._segment(base)
                if base == plan.chunks[-1][0]:
                    self._reserve(plan, file)
                if buffers:
                    file.append(buffers)
                    file.fdatasync()
        except DiskFullError:
            self._undo(plan)
            raise
        except FlushFailedError:
            raise
        except StorageError as error:
            raise FlushFailedError(error.message, **error.details) from error
        self.end_write(plan)
        self._protect(sealed)

    def begin_write(self, plan: WritePlan) -> AppendFile | None:
        """
        Write a plan without making it durable. Once its file is synced, call `end_write`.

        Returns:
            The file. None if the plan begins a segment, bytes have to be reserved, or the disk is
            full; then `write` the plan.

        Raises:
            FlushFailedError: see `write`.
        """
        assert plan.start == self.end
        (base, buffers), file = plan.chunks[0], self._active
        if len(plan.chunks) > 1 or file is None or base != self._bases[-1]:
            return None
        if self._reserves and file.reserved < plan.end - plan.start:
            return None
        size = file.size
        try:
            file.append(buffers)
        except DiskFullError:
            file.rewind(size)
            return None
        except StorageError as error:
            raise FlushFailedError(error.message, **error.details) from error
        return file

    def end_write(self, plan: WritePlan) -> None:
        """Note that a plan is durable."""
        self.end = plan.end
        for (base, _), traces in zip(plan.chunks, plan.traces, strict=True):
            if traces:
                self._trail.add(base, traces)

    def _reserve(self, plan: WritePlan, file: AppendFile) -> None:
        """Reserve bytes for a small plan and for later ones, if the disk has them."""
        length = plan.end - plan.start
        if not self._reserves or length > SMALL_BYTES_MAX or file.reserved >= length:
            return
        try:
            file.reserve(max(length, min(RESERVED_BYTES, self._segment_bytes - file.size)))
        except StorageError as error:
            log.debug("cannot reserve disk space for the log: %s", error.message)
        self._reserves = file.reserved >= length

    def _protect(self, sealed: list[int]) -> None:
        for base in sealed:
            try:
                self._files.protect(segment_path(base))
            except StorageError as error:
                log.warning("cannot make a sealed segment read-only: %s", error.message)

    def _segment(self, base: int) -> AppendFile:
        if self._active is not None and base == self._bases[-1]:
            return self._active
        self._close_active(cut=True)
        self._reserves = True
        file = self._active = self._files.open_append(segment_path(base))
        if base == self._bases[-1] and file.size != self.end - base:
            text = (
                f"{segment_path(base)} has {file.size} bytes, and the log ends at {self.end - base}"
            )
            raise StorageError(text, path=segment_path(base))
        self._files.sync_folder(FOLDER)
        if base != self._bases[-1]:
            self._bases = [*self._bases, base]
        return self._active

    def _close_active(self, *, cut: bool) -> None:
        """Close the last segment. With `cut`, cut off the bytes that are reserved for it."""
        file, self._active = self._active, None
        if file is None:
            return
        try:
            if cut and file.reserved:
                file.truncate(file.size)
        finally:
            file.close()

    def _undo(self, plan: WritePlan) -> None:
        """Cut the log at the end of the previous plan, durably, or raise FlushFailedError."""
        self._close_active(cut=False)
        try:
            while self._bases[-1] > plan.chunks[0][0]:
                self._remove_files(self._bases[-1])
                self._bases = self._bases[:-1]
            self._files.sync_folder(FOLDER)
            base = self._bases[-1]
            file = self._files.open_append(segment_path(base))
            file.truncate(plan.start - base)
            file.close()
        except StorageError as error:
            raise FlushFailedError(f"the disk is full, and {error.message}") from error

    def read(self, position: int, length: int) -> bytes:
        """
        Return up to `length` bytes at `position`, which must lie in one segment; there are fewer at
        the segment's end.

        Raises:
            CorruptLogError: the segment is missing.
        """
        return self.read_each([(position, length)])[0]

    def read_each(self, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        """
        Return the bytes of each (position, length), sorted by position. Each range must lie in one
        segment.

        Raises:
            CorruptLogError: a segment is missing.
        """
        parts: list[bytes] = []
        while len(parts) < len(ranges):
            first = len(parts)
            base, limit = self._segment_of(ranges[first][0])
            last = bisect_left(ranges, limit, first + 1, key=_start)
            here = [(start - base, length) for start, length in ranges[first:last]]
            parts += self._read_segment(base, here)
        return parts

    def _segment_of(self, position: int) -> tuple[int, int]:
        """Return the base of the segment that contains `position`, and the position at which the
        next segment begins.
        """
        bases = self._bases
        if position < bases[0]:
            raise CorruptLogError(
                f"the commit log begins at position {bases[0]}, behind {position}",
                position=position,
            )
        index = bisect_right(bases, position)
        limit = bases[index] if index < len(bases) else max(self.end, position + 1)
        return bases[max(index - 1, 0)], limit

    def _read_segment(self, base: int, ranges: Sequence[tuple[int, int]]) -> Sequence[bytes]:
        position = base + ranges[0][0]
        try:
            return self._files.preads(segment_path(base), ranges)
        except StorageError as error:
            raise CorruptLogError(
                f"the commit log cannot be read at position {position}: {error.message}",
                position=position,
            ) from error

    def segment_end(self, position: int) -> int:
        """Return the position at which the segment that contains `position` ends."""
        bases = self._bases
        index = bisect_right(bases, position)
        return bases[index] if index < len(bases) else self.end

    def drop_first(self) -> None:
        """
        Remove the first segment, durably. It must not be the segment that is being written.

        Raises:
            StorageError: the segment is no longer read, but its files may exist; the next call
                removes them first.
        """
        self.finish_drop()
        assert len(self._bases) > 1
        self._leaving = self._bases[0]
        self._bases = self._bases[1:]
        self.finish_drop()

    def finish_drop(self) -> None:
        """
        Remove the remaining files of a dropped segment, so that later segments may be removed
        without making a gap.

        Raises:
            StorageError: the files may still exist; the next call tries again.
        """
        if self._leaving is not None:
            self._remove_files(self._leaving)
            self._files.sync_folder(FOLDER)
            self._leaving = None

    def _remove_files(self, base: int) -> None:
        for path in (trail_path(base), segment_path(base)):
            if self._files.size(path) is not None:
                self._files.remove(path)

    def close(self) -> None:
        """Close the files."""
        self._trail.close()
        file = self._active
        # After a failed plan nothing is written any more.
        whole = file is not None and file.size == self.end - self._bases[-1]
        try:
            self._close_active(cut=whole)
        except StorageError as error:
            log.warning("cannot cut reserved bytes now, the next start will: %s", error.message)


def _start(range_: tuple[int, int]) -> int:
    return range_[0]
