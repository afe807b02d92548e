"""Reads the log at a start: every whole record from a position on, and every hole. Disk, through
`Files`.

    whole record ──▶ visitor.record
    bytes that are not a record, at position p:
        in an earlier segment                        → a hole
        a whole record with BARRIER follows p        → a hole
        p was durable, by the trail or the snapshot  → a hole
        else: a commit that never became durable     → cut at p, with zeros at the end, which were
                                                       reserved

A hole ends where the next whole record begins. It contains the known lost records: those from the
trail, and those with a whole header and a damaged body. A large hole, or one with unknown records,
is reported in parts.

Invariants
    No durable record is cut.
    Every record is visited once, in the order of the log, after its checksums and its position are
    checked. A record is made durable before it is served, because it may have been in the page
    cache only.

Source: Kafka truncates at the first bad record, and so loses later good records after bit rot (as
NATS #7549). The barrier distinguishes bit rot from an unfinished write without a second sync per
commit.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from ....protocol.errors import DataFolderError, StorageError
from ....protocol.record import (
    HEADER_BYTES,
    MAGIC,
    RECORD_BYTES_MAX,
    Header,
    Wrong,
    read_header,
    read_record,
)
from ....protocol.text import counted
from ..files import READ_BYTES, Files, replace_large_file, write_again
from .commit_log import BARRIER, FOLDER, segment_bases, segment_path
from .holes import Hole, Trace, Visitor
from .trail import TrailCursor, durable_end, trail_bases

log = logging.getLogger("keylane.broker")

AHEAD_BYTES = 8 << 20
"""The number of bytes that the kernel reads ahead while checksums are computed."""
TRACES_MAX = 20_000
"""The number of traces in a part of a hole. A lost segment may have a million records."""
_MAGIC_BYTES = MAGIC.to_bytes(4, "little")


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveredLog:
    """A recovered log: the bases of its segments, its end, and the number of bytes of an unfinished
    write.
    """

    bases: list[int]
    end: int
    cut_bytes: int = 0
    reserved_bytes: int = 0
    """The number of zeros at the end of the last segment, which are cut too."""
    unproven: int = 0
    """The position from which on records may be in the page cache only."""


def recover_log(
    files: Files, visitor: Visitor, *, start: int = 0, durable: int = 0
) -> RecoveredLog:
    """
    Read the log from the record at position `start` to its end, and prepare it for further writes.

    Args:
        durable: a position up to which the log is known to have been durable, or 0.

    Raises:
        DataFolderError: a newer broker wrote this log, the log is missing, or a file with a
            segment's name is not a part of it.
    """
    files.make_folder(FOLDER)
    recovered = scan_log(files, visitor, start=start, durable=durable)
    last = recovered.bases[-1]
    if files.size(segment_path(last)) is None:
        return recovered
    if recovered.cut_bytes:
        _keep_cut(files, last, recovered.end, recovered.cut_bytes)
    # A sealed segment is written again if all segments after it are lost.
    files.unprotect(segment_path(last))
    file = files.open_append(segment_path(last))
    try:
        if recovered.cut_bytes:
            log.warning(
                "cut %s of an unfinished write at position %d",
                counted(recovered.cut_bytes, "byte"),
                recovered.end,
            )
        if recovered.cut_bytes or recovered.reserved_bytes:
            file.truncate(recovered.end - last)
        unproven = max(recovered.unproven, last)
        write_again(
            files, segment_path(last), file, start=unproven - last, end=recovered.end - last
        )
        file.fdatasync()
    finally:
        file.close()
    return recovered


def scan_log(files: Files, visitor: Visitor, *, start: int = 0, durable: int = 0) -> RecoveredLog:
    """Read the log like `recover_log`, but change nothing: the bytes that recovery would cut are
    only counted.
    """
    return _Scan(files, visitor, start=start, durable=durable).run()


class _Scan:
    """One pass over the log."""

    def __init__(self, files: Files, visitor: Visitor, *, start: int, durable: int) -> None:
        self._files = files
        self._visitor = visitor
        self._bases = segment_bases(files)
        self._trails = trail_bases(files)
        self._at = start if start or not self._bases else self._bases[0]
        self._barrier = 0
        """The position of the newest record with BARRIER: every byte before it was durable."""
        self._durable = max([durable, *(durable_end(files, base) for base in self._trails[-1:])])
        self._cursors = {base: TrailCursor(files, base) for base in self._trails}

    def run(self) -> RecoveredLog:
        self._check_belongs()
        self._lose_missing_before_start()
        if self._bases and self._at < self._bases[0]:
            self._lose(self._bases[0], "a segment is missing")
        for base, following in pairwise(self._bases):
            end = min(base + (self._files.size(segment_path(base)) or 0), following)
            while self._at < following:
                problem = self._read(base, end)
                if self._at < following:
                    whole = self._next_whole(base)
                    self._lose(whole or following, problem or "a segment is missing or cut")
        return self._scan_last_segment()

    def _check_belongs(self) -> None:
        """Raise DataFolderError if the log is missing, or if its last file begins after the
        greatest end that the log ever had.
        """
        reached = max(self._at, self._durable)
        if not self._bases and not self._trails and reached:
            raise DataFolderError(
                f"{self._files.name()}/{FOLDER} has no segments, and a snapshot says "
                f"that the log reached "
                f"position {reached}: put {FOLDER}/ back",
                path=FOLDER,
            )
        if len(self._bases) < 2:
            return
        before, last = self._bases[-2:]
        end = before + (self._files.size(segment_path(before)) or 0)
        if end < last and self._durable < last and self._next_in(last) is None:
            raise DataFolderError(
                f"{self._files.name()}/{segment_path(last)} is not a part of the log, which ends "
                f"at position "
                f"{end}: move it away",
                path=segment_path(last),
            )

    def _next_in(self, base: int) -> Header | None:
        return next(whole_records(self._files, base, base), None)

    def _lose_missing_before_start(self) -> None:
        """Report missing bytes of the segments before the start, which are not read."""
        start = self._at
        bases = self._bases or [self._trails[0] if self._trails else 0]
        for base, following in pairwise([*bases, start]):
            end = base + (self._files.size(segment_path(base)) or 0)
            if end < following <= start:
                self._at = end
                self._lose(following, "a segment is missing or cut")
        self._at = start

    def _scan_last_segment(self) -> RecoveredLog:
        """
        Read the last segment, the only one that may end in an unfinished write.

        Returns:
            The recovered log, which ends after the last whole record. If durable bytes are missing
            there, it ends after them, and a new segment begins.
        """
        base = self._bases[-1] if self._bases else self._at
        end = base + (self._files.size(segment_path(base)) or 0)
        # Bytes that are not a record were durable if a whole record after them lies below the known
        # durable end, or has BARRIER: then they are a hole. Otherwise they are an unfinished write,
        # and are cut.
        while (problem := self._read(base, end)) is not None:
            whole = self._next_whole(base)
            if whole is not None and (whole < self._durable or self._barrier_follows(base)):
                self._lose(whole, problem)
            elif self._at < self._durable:
                break
            else:
                return self._recovered(end)
        if self._at < self._durable:
            self._lose(self._durable, problem or "the end is missing")
        if self._at > end or not self._bases:
            self._bases.append(self._at)
        return self._recovered(end)

    def _recovered(self, end: int) -> RecoveredLog:
        """Return the log that ends at the present position, where the last file has bytes until
        `end`.
        """
        base = self._bases[-1]
        written = written_end(self._files, base, self._at, end) if self._at < end else self._at
        return RecoveredLog(
            bases=self._bases,
            end=self._at,
            cut_bytes=written - self._at,
            reserved_bytes=max(0, end - written),
            unproven=max(self._durable, self._barrier),
        )

    def _read(self, base: int, end: int) -> str | None:
        """Visit whole records up to `end`. Return the problem at which the visit stopped, or None
        at `end`.
        """
        path = segment_path(base)
        wanted = READ_BYTES
        while self._at < end:
            length = min(max(wanted, READ_BYTES), end - self._at)
            ahead = self._at + length
            if ahead < end:
                self._files.will_read(path, ahead - base, AHEAD_BYTES)
            data = self._files.pread(path, self._at - base, length)
            view = memoryview(data)
            start = 0
            while True:
                header = read_record(data, start)
                if not isinstance(header, Header):
                    break
                if header.position != self._at + start:
                    header = Wrong(f"a record of position {header.position}")
                    break
                if header.flags & BARRIER:
                    self._barrier = header.position
                self._visitor.record(header, view[start + HEADER_BYTES : start + header.length])
                start += header.length
            self._at += start
            if isinstance(header, Wrong):
                if header.reason.startswith("version"):
                    raise DataFolderError(
                        f"{self._files.name()} was written by a newer broker: "
                        f"{header.reason} of the record at position {self._at}"
                    )
                return header.reason
            wanted = header.wanted
            if self._at < end < self._at + wanted:
                return "a record cut short"
        return None

    def _lose(self, end: int, reason: str) -> None:
        """Report the hole from the present position to `end`, in parts, and continue at `end`."""
        damage = self._at, end
        begin = at = self._at
        run: list[Trace] = []

        def tell(end: int, *, explained: bool) -> None:
            nonlocal begin
            if begin < end:
                self._visitor.hole(
                    Hole(
                        start=begin,
                        end=end,
                        reason=reason,
                        traces=tuple(run),
                        explained=explained,
                        damage=damage,
                    )
                )
                run.clear()
                begin = end

        for trace in self._known(at, end):
            position = trace.header.position
            if position > at:
                tell(at, explained=True)
                tell(position, explained=False)
            run.append(trace)
            at = position + trace.header.length
            if len(run) >= TRACES_MAX and at <= end:
                tell(at, explained=True)
        tell(min(at, end), explained=at <= end)
        tell(end, explained=False)
        self._at = end

    def _known(self, start: int, end: int) -> Iterator[Trace]:
        """Yield the known lost records in `[start, end)`, in the order of the log, from the trail
        and from whole headers.
        """
        at = start
        for trace in self._traces(start, end):
            position = trace.header.position
            if position < at:
                continue
            for header in self._headers(at, position):
                yield Trace(header, None)
            yield trace
            at = position + trace.header.length
        for header in self._headers(at, end):
            yield Trace(header, None)

    def _traces(self, start: int, end: int) -> Iterator[Trace]:
        for index, base in enumerate(self._trails):
            last = index + 1 == len(self._trails)
            if base < end and (last or start < self._trails[index + 1]):
                yield from self._cursors[base].between(start, end)

    def _headers(self, start: int, end: int) -> Iterator[Header]:
        """Yield the chain of whole headers that begins at `start`: each record's length leads to
        the next header.
        """
        while start < end:
            base = max((base for base in self._bases if base <= start), default=None)
            if base is None:
                break
            try:
                data = self._files.pread(segment_path(base), start - base, HEADER_BYTES)
            except StorageError:
                break
            header = read_header(data)
            if not isinstance(header, Header) or header.position != start:
                break
            if start + header.length > end:
                break
            yield header
            start += header.length

    def _next_whole(self, base: int) -> int | None:
        """Return the position of the first whole record after the damage in the segment, or
        None.
        """
        return next((header.position for header in self._whole_after(base)), None)

    def _barrier_follows(self, base: int) -> bool:
        return any(header.flags & BARRIER for header in self._whole_after(base))

    def _whole_after(self, base: int) -> Iterator[Header]:
        """Yield the whole records of a segment after the damaged record at the present position."""
        header = read_header(self._files.pread(segment_path(base), self._at - base, HEADER_BYTES))
        position = self._at + 1
        if isinstance(header, Header) and header.position == self._at:
            position = self._at + header.length  # bytes of its body must not count as records
        return whole_records(self._files, base, position)


def written_end(files: Files, base: int, start: int, end: int) -> int:
    """Return the position after the last byte in `[start, end)` of a segment that is not zero, or
    `start` if all are zero.
    """
    path = segment_path(base)
    while start < end:
        at = max(start, end - READ_BYTES)
        kept = files.pread(path, at - base, end - at).rstrip(b"\0")
        if kept:
            return at + len(kept)
        end = at
    return start


def whole_records(files: Files, base: int, position: int) -> Iterator[Header]:
    """Yield the whole records of a segment that begin at or above `position`. Other bytes are
    skipped.
    """
    path = segment_path(base)
    size = files.size(path) or 0
    at = position - base
    while at < size:
        data = files.pread(path, at, READ_BYTES + RECORD_BYTES_MAX)
        start = data.find(_MAGIC_BYTES)
        while 0 <= start < READ_BYTES:
            header = read_record(data, start)
            step = 1
            if isinstance(header, Header) and header.position == base + at + start:
                yield header
                step = header.length
            start = data.find(_MAGIC_BYTES, start + step)
        at += READ_BYTES if start < 0 else start


def _keep_cut(files: Files, base: int, position: int, length: int) -> None:
    """Copy the `length` bytes of an unfinished write, which are about to be cut, if they contain
    whole records.
    """
    whole = sum(1 for _ in whole_records(files, base, position))
    if not whole:
        return
    path = segment_path(base)
    start, end = position - base, position - base + length
    parts = (
        [files.pread(path, at, min(READ_BYTES, end - at))] for at in range(start, end, READ_BYTES)
    )
    replace_large_file(files, f"cut-{position:020d}.bin", parts)
    log.warning(
        "%d whole records of the unfinished write are kept in cut-%020d.bin", whole, position
    )
