"""The commit log: all records of a broker, one after another, in segment files.  Disk, through `Files`.

    log/00000000000000000000.log   log/00000000001073741712.log   …      named by the position they begin at

    position = number of the byte in the whole log; a record lies in one segment.  Segments join without a gap; where
    bytes were lost, the next segment begins after them, and the gap stays.

Invariants
    Positions only grow; a segment is durable before the next one is created, and is never written again after it.
    A record with BARRIER was written when everything before it was durable.  So damage followed by a whole record
    with BARRIER hit durable bytes; damage without one behind it is a commit that was never made durable.
    The body of a record is never copied and never touched: only its 96 bytes of header are stamped.
    Segments go from the first on, and one only when the one before it is durably gone.
"""

from __future__ import annotations

import logging
from bisect import bisect_left, bisect_right
from collections.abc import Sequence

from ....protocol.errors import CorruptLogError, DiskFullError, FlushFailedError, StorageError
from ....protocol.record import HEADER_BYTES, stamp
from ..append_file import Buffer
from ..files import AppendFile, Files
from .trail import TrailWriter, bytes_kept, trail_path

log = logging.getLogger("keylane.broker")

FOLDER = "log"
SUFFIX = ".log"
BARRIER = 0x80
_FLAGS_AT = 15
_KIND_AT = 13


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
        self._traces: list[Buffer] = []
        self.chunks: list[tuple[int, list[Buffer]]] = [(base, self._buffers)]
        """(base of the segment, buffers to write at its end), in the order of writing."""
        self.traces: list[list[Buffer]] = [self._traces]
        """What the trails get of each chunk."""

    def add(
        self, record: Buffer, *, base_offset: int, appended_at_ms: int
    ) -> tuple[int, bytearray]:
        """Place a record, which must stay as it is until it is written; its position and stamped header."""
        length = len(record)
        if self.end > self._base and self.end - self._base + length > self._segment_bytes:
            self._roll()
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
            if bytes_kept(header[_KIND_AT], length) > HEADER_BYTES:
                self._traces.append(body)
        self.end = position + length
        return position, header

    def _roll(self) -> None:
        self._base = self.end
        self._buffers = []
        self._traces = []
        self.chunks.append((self._base, self._buffers))
        self.traces.append(self._traces)
        self._barrier = True


class CommitLog:
    """The log as recovery found it, ready to be written by one thread and read by many."""

    def __init__(self, files: Files, *, segment_bytes: int, bases: Sequence[int], end: int) -> None:
        self._files = files
        self._segment_bytes = segment_bytes
        self._bases = list(bases) or [end]
        """Replaced, never changed: readers in other threads go by the list they have."""
        self._leaving: int | None = None
        """Base of a segment that nobody reads any more, and whose files may still be there."""
        self.end = end
        """Position after the last durable record; what a crash leaves ends there or behind it."""
        self._active: AppendFile | None = None
        self._trail = TrailWriter(files)

    @property
    def first_position(self) -> int:
        """Position of the first record that can still be read."""
        return self._bases[0]

    @property
    def leaving(self) -> bool:
        """Is a segment dropped whose files may still be there, because removing them failed."""
        return self._leaving is not None

    @property
    def bases(self) -> list[int]:
        """Where the segments begin, sorted; the last one is written to."""
        return list(self._bases)

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
        sealed: list[int] = []
        try:
            for base, buffers in plan.chunks:
                if not buffers:
                    continue
                if base != self._bases[-1]:
                    sealed.append(self._bases[-1])
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
        for (base, _), traces in zip(plan.chunks, plan.traces, strict=True):
            if traces:
                self._trail.add(base, traces)
        self._protect(sealed)

    def _protect(self, sealed: list[int]) -> None:
        for base in sealed:
            try:
                self._files.protect(segment_path(base))
            except StorageError as error:
                log.warning("a sealed segment stays writable: %s", error.message)

    def _segment(self, base: int) -> AppendFile:
        if self._active is not None and base == self._bases[-1]:
            return self._active
        if self._active is not None:
            self._active.close()
            self._active = None
        self._active = self._files.open_append(segment_path(base))
        self._files.sync_folder(FOLDER)
        if base != self._bases[-1]:
            self._bases = [*self._bases, base]
        return self._active

    def _undo(self, plan: WritePlan) -> None:
        if self._active is not None:
            self._active.close()
            self._active = None
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
        The bytes at `position`, which must lie in one segment; fewer if they are not there.

        Raises:
            CorruptLogError: the segment is missing.
        """
        return self.read_each([(position, length)])[0]

    def read_each(self, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        """
        The bytes of each (position, length); each must lie in one segment, and behind the one before it.

        Raises:
            CorruptLogError: a segment is missing.
        """
        found: list[bytes] = []
        while len(found) < len(ranges):
            first = len(found)
            base, limit = self._segment_of(ranges[first][0])
            last = bisect_left(ranges, limit, first + 1, key=_start)
            here = [(start - base, length) for start, length in ranges[first:last]]
            found += self._read_segment(base, here)
        return found

    def _segment_of(self, position: int) -> tuple[int, int]:
        """Where the segment that holds `position` begins, and where no other one has begun yet."""
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
        """Where the segment that holds `position` ends."""
        bases = self._bases
        index = bisect_right(bases, position)
        return bases[index] if index < len(bases) else self.end

    def drop_first(self) -> None:
        """
        Remove the first segment for ever; the one that is written to stays.

        Raises:
            StorageError: nobody reads it any more; its files go with the next call, before any other's.
        """
        self.finish_drop()
        assert len(self._bases) > 1
        self._leaving, self._bases = self._bases[0], self._bases[1:]
        self.finish_drop()

    def finish_drop(self) -> None:
        """
        Remove what is left of a dropped segment: were a later one gone before it, the log would have a gap.

        Raises:
            StorageError: it is tried again with the next call.
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
        """Let go of the files."""
        self._trail.close()
        if self._active is not None:
            self._active.close()
            self._active = None


def _start(one: tuple[int, int]) -> int:
    return one[0]
