"""The commit log: all records of a broker, one after another, in segment files.  Disk, through `Files`.

    log/00000000000000000000.log   log/00000000001073741712.log   …      named by the position they begin at

    position = number of the byte in the whole log; a record lies in one segment, and segments join without a gap.

Invariants
    Positions only grow; a segment is durable before the next one is created.
    A record with BARRIER was written when everything before it was durable.  So damage followed by a whole record
    with BARRIER hit durable bytes; damage without one behind it is a group commit that never finished.
    The body of a record is never copied and never touched: only its 96 bytes of header are stamped.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from ...protocol.errors import DiskFullError, FlushFailedError, StorageError
from ...protocol.record import HEADER_BYTES, stamp
from .files import AppendFile, Buffer, Files

FOLDER = "log"
SUFFIX = ".log"
BARRIER = 0x80
_FLAGS_AT = 15


def segment_path(base: int) -> str:
    """Path of the segment that begins at position `base`."""
    return f"{FOLDER}/{base:020d}{SUFFIX}"


def segment_bases(files: Files) -> list[int]:
    """Positions at which the segments on disk begin, sorted; other files in the folder are left alone."""
    return [
        int(name[:20])
        for name in files.list(FOLDER)
        if len(name) == 20 + len(SUFFIX) and name.endswith(SUFFIX) and name[:20].isdecimal()
    ]


class WritePlan:
    """What one group commit writes and where: places records, rolls segments, stamps headers.  Pure."""

    def __init__(self, *, base: int, end: int, segment_bytes: int) -> None:
        self._segment_bytes = segment_bytes
        self._base = base
        self.start = end
        self.end = end
        self._barrier = True
        self._buffers: list[Buffer] = []
        self.chunks: list[tuple[int, list[Buffer]]] = [(base, self._buffers)]
        """(base of the segment, buffers to write at its end), in the order of writing."""

    def add(
        self, record: Buffer, *, base_offset: int, appended_at_ms: int
    ) -> tuple[int, bytearray]:
        """Place a record, which must stay as it is until it is written; its position and stamped header."""
        length = len(record)
        if self.end > self._base and self.end - self._base + length > self._segment_bytes:
            self._base = self.end
            self._buffers = []
            self.chunks.append((self._base, self._buffers))
            self._barrier = True
        position = self.end
        header = bytearray(record[:HEADER_BYTES])
        if self._barrier:
            header[_FLAGS_AT] |= BARRIER
            self._barrier = False
        else:
            header[_FLAGS_AT] &= ~BARRIER
        stamp(header, base_offset=base_offset, position=position, appended_at_ms=appended_at_ms)
        self._buffers.append(header)
        if length > HEADER_BYTES:
            self._buffers.append(memoryview(record)[HEADER_BYTES:])
        self.end = position + length
        return position, header


class CommitLog:
    """The log as recovery found it, ready to be written by one thread and read by many."""

    def __init__(self, files: Files, *, segment_bytes: int, bases: Sequence[int], end: int) -> None:
        self._files = files
        self._segment_bytes = segment_bytes
        self._bases = list(bases) or [end]
        self.end = end
        """Position after the last durable record."""
        self._active: AppendFile | None = None

    @property
    def first_position(self) -> int:
        """Position of the first record still stored."""
        return self._bases[0]

    def plan(self) -> WritePlan:
        """An empty plan; only one may be under way."""
        return WritePlan(base=self._bases[-1], end=self.end, segment_bytes=self._segment_bytes)

    def write(self, plan: WritePlan) -> None:
        """
        Write a plan and make it durable.

        Raises:
            DiskFullError: nothing of the plan was kept; a later plan may be tried.
            FlushFailedError: nothing is known about the plan's records; never write again.
        """
        assert plan.start == self.end
        try:
            for base, buffers in plan.chunks:
                if buffers:
                    file = self._segment(base)
                    file.append(buffers)
                    file.fdatasync()
        except DiskFullError:
            self._undo(plan)
            raise
        except FlushFailedError:
            raise
        except StorageError as error:
            raise FlushFailedError(error.message, **error.details) from error
        self.end = plan.end

    def _segment(self, base: int) -> AppendFile:
        if self._active is not None and base == self._bases[-1]:
            return self._active
        if self._active is not None:
            self._active.close()
            self._active = None
        self._active = self._files.open_append(segment_path(base))
        self._files.sync_folder(FOLDER)
        if base != self._bases[-1]:
            self._bases.append(base)
        return self._active

    def _undo(self, plan: WritePlan) -> None:
        if self._active is not None:
            self._active.close()
            self._active = None
        try:
            while self._bases[-1] > plan.chunks[0][0]:
                path = segment_path(self._bases[-1])
                if self._files.size(path) is not None:
                    self._files.remove(path)
                self._bases.pop()
            self._files.sync_folder(FOLDER)
            base = self._bases[-1]
            file = self._files.open_append(segment_path(base))
            file.truncate(plan.start - base)
            file.close()
        except StorageError as error:
            raise FlushFailedError(f"the disk is full, and {error.message}") from error

    def read(self, position: int, length: int) -> bytes:
        """The bytes at `position`, which must lie in one segment; fewer if they are not there."""
        base = self._bases[bisect_right(self._bases, position) - 1]
        return self._files.pread(segment_path(base), position - base, length)

    def segment_end(self, position: int) -> int:
        """Where the segment that holds `position` ends."""
        index = bisect_right(self._bases, position)
        return self._bases[index] if index < len(self._bases) else self.end

    def close(self) -> None:
        """Let go of the active segment."""
        if self._active is not None:
            self._active.close()
            self._active = None
