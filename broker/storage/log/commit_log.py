"""The commit log: all records of a broker, in order, stored in segment files. Does disk I/O through
`Files`.

    log/00000000000000000000.log   log/00000000001073741712.log   …
        each named by the position of its first byte

    A position is the index of a byte in the whole log. A record lies within one segment. A segment
    begins where the previous one ends. Only lost bytes leave a gap, which is never filled.

Invariants
    Positions only grow. A segment is durable before the next one is created, and is not written
    afterwards. A record has the BARRIER flag if every byte before it was durable when it was
    written. So damage before an intact BARRIER record is damage to durable bytes; damage that is
    not followed by such a record is a commit that never became durable. The body of a record is
    neither copied nor changed: only its header of 96 bytes is stamped. Segments are removed oldest
    first, each only after the removal of the previous one is durable. The last segment may have
    zeros after its end, which are reserved for small plans. They are truncated when the segment is
    full, when the log is closed, and when the broker starts.
"""

from __future__ import annotations

import logging
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from itertools import chain

from ....protocol.errors import CorruptLogError, DiskFullError, FlushFailedError, StorageError
from ....protocol.record import HEADER_BYTES, Kind, stamp_record
from ..append_file import Buffer
from ..files import AppendFile, Files, file_numbers
from .trail import TrailWriter, trail_bytes, trail_path

log = logging.getLogger("keylane.broker")

FOLDER = "log"
SUFFIX = ".log"
BARRIER = 0x80
RESERVED_BYTES = 1 << 20
"""The number of bytes reserved after the end for small plans. Syncing a write takes only two thirds
of the time if the bytes were reserved.
"""
SMALL_BYTES_MAX = 64 << 10
"""The maximum size of a small plan in bytes. For a small plan, bytes are reserved, and the kernel
may sync it. Larger plans need few syncs per byte.
"""
_FLAGS_BYTE = 15
_KIND_BYTE = 13
_MESSAGES = int(Kind.MESSAGES)


def segment_path(base: int) -> str:
    """Return the path of the segment that begins at position `base`."""
    return f"{FOLDER}/{base:020d}{SUFFIX}"


def segment_bases(files: Files) -> list[int]:
    """Return the sorted positions at which the segments on the disk begin, ignoring other files."""
    return file_numbers(files.list(FOLDER), digits=20, suffix=SUFFIX)


class WritePlan:
    """The writes of a group commit. Assigns positions, rolls segments, and stamps headers. Pure."""

    def __init__(self, *, base: int, end: int, segment_bytes: int) -> None:
        self._segment_bytes = segment_bytes
        self._base = base
        self.start = end
        self.end = end
        self._barrier = True
        self._buffers: list[Buffer] = []
        self._trail_buffers: list[Buffer] = []
        self.chunks: list[tuple[int, list[Buffer]]] = [(base, self._buffers)]
        """For each segment, its base and the buffers to append to it, in the order of writing."""
        self.trail_chunks: list[list[Buffer]] = [self._trail_buffers]
        """For each chunk, the buffers to append to its segment's trail."""

    def add(
        self, record: Buffer, *, base_offset: int, appended_at_ms: int
    ) -> tuple[int, bytearray]:
        """Add a record, whose buffer must not change until it is written. Return the record's
        position and its stamped header.
        """
        length = len(record)
        if self.end - self._base + length > self._segment_bytes:
            self.begin_segment()
        position = self.end
        header = bytearray(record[:HEADER_BYTES])
        if self._barrier:
            header[_FLAGS_BYTE] |= BARRIER
            self._barrier = False
        else:
            header[_FLAGS_BYTE] &= ~BARRIER
        stamp_record(
            header, base_offset=base_offset, position=position, appended_at_ms=appended_at_ms
        )
        self._buffers.append(header)
        self._trail_buffers.append(header)
        if length > HEADER_BYTES:
            body = memoryview(record)[HEADER_BYTES:]
            self._buffers.append(body)
            kind = header[_KIND_BYTE]
            if kind != _MESSAGES and trail_bytes(kind, length) > HEADER_BYTES:
                self._trail_buffers.append(body)
        self.end = position + length
        return position, header

    def read(self, position: int, length: int) -> bytes:
        """Return `length` bytes of the log at `position`, both of which the plan has."""
        parts: list[memoryview] = []
        at = self.start
        for buffer in chain.from_iterable(buffers for _, buffers in self.chunks):
            following = at + len(buffer)
            if following > position:
                first = max(0, position - at)
                parts.append(memoryview(buffer)[first : first + length])
                length -= len(parts[-1])
                if not length:
                    break
            at = following
        return b"".join(parts)

    def begin_segment(self) -> None:
        """Make the next record begin a new segment, unless the current one is empty."""
        if self.end == self._base:
            return
        self._base = self.end
        self._buffers = []
        self._trail_buffers = []
        self.chunks.append((self._base, self._buffers))
        self.trail_chunks.append(self._trail_buffers)


class CommitLog:
    """A recovered log. One thread writes; many threads may read."""

    def __init__(self, files: Files, *, segment_bytes: int, bases: Sequence[int], end: int) -> None:
        self._files = files
        self._segment_bytes = segment_bytes
        self._bases = list(bases) or [end]
        """This list is replaced and never modified, because readers in other threads use it."""
        self._undeleted_base: int | None = None
        """The base of a removed segment whose files may still exist. It is no longer read."""
        self.end = end
        """The position that follows the last durable record. After a crash, the log does not end
        before it.
        """
        self._unsynced: WritePlan | None = None
        """The plan that is in the page cache and not durable yet."""
        self._active: AppendFile | None = None
        self._can_reserve = True
        """False if the last attempt to reserve bytes for the active segment failed."""
        self._trail = TrailWriter(files)

    @property
    def written_end(self) -> int:
        """The position that follows the last record in the page cache: `end`, or the end of a plan
        that is not durable yet.
        """
        plan = self._unsynced
        return self.end if plan is None else plan.end

    @property
    def first_position(self) -> int:
        """The position of the first record that can still be read."""
        return self._bases[0]

    @property
    def has_undeleted(self) -> bool:
        """True if the files of a removed segment may still exist, because deleting them failed."""
        return self._undeleted_base is not None

    @property
    def bases(self) -> list[int]:
        """The sorted positions at which the segments begin. The last segment is being written."""
        return list(self._bases)

    def plan(self) -> WritePlan:
        """Return an empty plan, which must be written before the next one is made."""
        return WritePlan(base=self._bases[-1], end=self.end, segment_bytes=self._segment_bytes)

    def write(self, plan: WritePlan) -> None:
        """Write a plan and make it durable. Raises the same errors as `write_bytes`."""
        self.write_bytes(plan)
        self.end_write(plan)

    def write_bytes(self, plan: WritePlan, on_written: Callable[[], object] = lambda: None) -> None:
        """
        Write a plan and sync it. The caller must call `end_write` when it is durable.

        Args:
            on_written: called when all of it is in the page cache, before the last sync.

        Raises:
            DiskFullError: no record of the plan is in the log; a later plan may succeed.
            FlushFailedError: the plan's records may or may not be on the disk; the log must not be
                written again.
        """
        assert plan.start == self.end
        sealed_bases: list[int] = []
        try:
            for base, buffers in plan.chunks:
                if not buffers and base <= self._bases[-1]:
                    continue
                if base != self._bases[-1]:
                    sealed_bases.append(self._bases[-1])
                file = self._open_segment(base)
                if base == plan.chunks[-1][0]:
                    self._reserve(plan, file)
                if buffers:
                    file.append(buffers)
                    if base == plan.chunks[-1][0]:
                        self._unsynced = plan
                        on_written()
                    file.fdatasync()
        except DiskFullError:
            self._undo_write(plan)
            raise
        except FlushFailedError:
            raise
        except StorageError as error:
            raise FlushFailedError(error.message, **error.details) from error
        self._protect(sealed_bases)

    def begin_write(self, plan: WritePlan) -> AppendFile | None:
        """
        Write a plan without making it durable. The caller must call `end_write` when the file has
        been synced.

        Returns:
            The file to sync. None if nothing was written, because the plan begins a segment, bytes
            must be reserved first, or the disk is full; in that case, call `write`.

        Raises:
            FlushFailedError: see `write`.
        """
        assert plan.start == self.end
        (base, buffers), file = plan.chunks[0], self._active
        if len(plan.chunks) > 1 or file is None or base != self._bases[-1]:
            return None
        if self._can_reserve and file.reserved < plan.end - plan.start:
            return None
        size = file.size
        try:
            file.append(buffers)
        except DiskFullError:
            file.rewind(size)
            return None
        except StorageError as error:
            raise FlushFailedError(error.message, **error.details) from error
        self._unsynced = plan
        return file

    def end_write(self, plan: WritePlan) -> None:
        """Record that a plan is durable, and add its records to the trail."""
        self.end, self._unsynced = plan.end, None
        for (base, _), buffers in zip(plan.chunks, plan.trail_chunks, strict=True):
            if buffers:
                self._trail.add(base, buffers)

    def _reserve(self, plan: WritePlan, file: AppendFile) -> None:
        """Try to reserve bytes for a small plan and for later ones."""
        length = plan.end - plan.start
        if not self._can_reserve or length > SMALL_BYTES_MAX or file.reserved >= length:
            return
        try:
            file.reserve(max(length, min(RESERVED_BYTES, self._segment_bytes - file.size)))
        except StorageError as error:
            log.debug("cannot reserve disk space for the log: %s", error.message)
        self._can_reserve = file.reserved >= length

    def _protect(self, sealed_bases: list[int]) -> None:
        for base in sealed_bases:
            try:
                self._files.protect(segment_path(base))
            except StorageError as error:
                log.warning("cannot make a sealed segment read-only: %s", error.message)

    def _open_segment(self, base: int) -> AppendFile:
        """Return the open file of the active segment, or begin the segment at `base`."""
        if self._active is not None and base == self._bases[-1]:
            return self._active
        self._close_active(must_truncate=True)
        self._can_reserve = True
        file = self._active = self._files.open_append(segment_path(base))
        if base == self._bases[-1] and file.size != self.end - base:
            text = f"{segment_path(base)} has {file.size} bytes, not {self.end - base}"
            raise StorageError(text, path=segment_path(base))
        self._files.sync_folder(FOLDER)
        if base != self._bases[-1]:
            self._bases = [*self._bases, base]
        return self._active

    def _close_active(self, *, must_truncate: bool) -> None:
        """Close the last segment. If `must_truncate` is true, truncate its reserved bytes first."""
        file, self._active = self._active, None
        if file is None:
            return
        try:
            if must_truncate and file.reserved:
                file.truncate(file.size)
        finally:
            file.close()

    def _undo_write(self, plan: WritePlan) -> None:
        """Truncate the log to the end of the previous plan, durably. Raises FlushFailedError."""
        self._close_active(must_truncate=False)
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

    def read_unsynced(self, position: int, length: int) -> bytes | None:
        """Return bytes of the plan that is not durable yet, from memory; None if there is no such
        plan, or it begins after `position`.
        """
        plan = self._unsynced
        return plan.read(position, length) if plan is not None and position >= plan.start else None

    def read(self, position: int, length: int) -> bytes:
        """
        Return `length` bytes at `position`, or fewer at the end of the segment. The range must lie
        within one segment.

        Raises:
            CorruptLogError: the segment is missing.
        """
        return self.read_ranges([(position, length)])[0]

    def read_ranges(self, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        """
        Return the bytes of each (position, length). The ranges must be sorted by position, and each
        must lie within one segment.

        Raises:
            CorruptLogError: a segment is missing.
        """
        parts: list[bytes] = []
        while len(parts) < len(ranges):
            first_index = len(parts)
            base, limit = self._segment_of(ranges[first_index][0])
            end_index = bisect_left(ranges, limit, first_index + 1, key=_position_of)
            in_segment = [(start - base, length) for start, length in ranges[first_index:end_index]]
            parts += self._read_segment(base, in_segment)
        return parts

    def _segment_of(self, position: int) -> tuple[int, int]:
        """Return the base of the segment that contains `position`, and the base of the next one."""
        bases = self._bases
        if position < bases[0]:
            raise CorruptLogError(
                f"the commit log begins at position {bases[0]}, after {position}",
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
        """Return the end of the segment that contains `position`."""
        return self.segment_of(position, self.end)[1]

    def segment_of(self, position: int, end: int) -> tuple[int, int]:
        """Return the base of the segment that contains `position`, and its end in a log that ends
        at `end`: a segment may have been begun of which nothing is written yet.
        """
        bases = self._bases
        index = bisect_right(bases, position)
        limit = bases[index] if index < len(bases) else end
        return bases[max(index - 1, 0)], min(limit, end)

    def remove_first_segment(self) -> None:
        """
        Remove the oldest segment, durably. It must not be the active one.

        Raises:
            StorageError: the segment is no longer read, but its files may still exist; the next
                call deletes them first.
        """
        self.delete_leftovers()
        assert len(self._bases) > 1
        self._undeleted_base = self._bases[0]
        self._bases = self._bases[1:]
        self.delete_leftovers()

    def delete_leftovers(self) -> None:
        """
        Delete the remaining files of a removed segment. Until this is done, no later segment is
        removed, because that would leave a gap.

        Raises:
            StorageError: the files may still exist; the next call will try again.
        """
        if self._undeleted_base is not None:
            self._remove_files(self._undeleted_base)
            self._files.sync_folder(FOLDER)
            self._undeleted_base = None

    def _remove_files(self, base: int) -> None:
        for path in (trail_path(base), segment_path(base)):
            if self._files.size(path) is not None:
                self._files.remove(path)

    def close(self) -> None:
        """Close the files."""
        self._trail.close()
        file = self._active
        # Do not truncate after a failed plan, because nothing may be written then.
        is_clean = file is not None and file.size == self.end - self._bases[-1]
        try:
            self._close_active(must_truncate=is_clean)
        except StorageError as error:
            log.warning(
                "cannot truncate reserved bytes; the next start will do it: %s", error.message
            )


def _position_of(position_and_length: tuple[int, int]) -> int:
    return position_and_length[0]
