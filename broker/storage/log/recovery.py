"""Recovers the log when the broker starts: visits every intact record from a position on, and every
hole. Does disk I/O through `Files`.

    intact record ──▶ visitor.on_record
    bytes that are not a record, at position p:
        in an earlier segment                        → a hole
        an intact record with BARRIER follows p      → a hole
        the trail or a snapshot proves p durable     → a hole
        else: a commit that never became durable     → cut at p, reserved zeros included

A hole ends where the next intact record begins. Its known lost records are those in the trail, and
those with an intact header and a damaged body. A large hole, or one with unknown records, is
reported in parts.

Invariants
    No durable record is cut.
    Every record is visited once, in the order of the log, after its checksums and position are
    verified. Records that may exist only in the page cache are made durable before they are served.

Kafka, in contrast, truncates at the first bad record, so after bit rot it loses later good records
(as does NATS, #7549). The barrier distinguishes bit rot from an unfinished write without a second
sync per commit.
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
    InvalidRecord,
    read_header,
    read_record,
)
from ....protocol.text import counted
from ..files import READ_BYTES, Files, replace_large_file, rewrite_in_place
from .commit_log import BARRIER, FOLDER, segment_bases, segment_path
from .holes import Hole, TrailEntry, Visitor
from .trail import TrailCursor, durable_end, trail_bases

log = logging.getLogger("keylane.broker")

AHEAD_BYTES = 8 << 20
"""The number of bytes that the kernel reads ahead while checksums are being computed."""
LOST_RECORDS_MAX = 20_000
"""The maximum number of known lost records in a part of a hole. A lost segment may have a
million.
"""
_MAGIC_BYTES = MAGIC.to_bytes(4, "little")


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveredLog:
    """A recovered log."""

    bases: list[int]
    """The positions at which the segments begin."""
    end: int
    cut_bytes: int = 0
    """The size of an unfinished write, which is cut, in bytes."""
    reserved_bytes: int = 0
    """The number of reserved zero bytes at the end of the last segment, which are cut as well."""
    maybe_unsynced_from: int = 0
    """The position from which records may exist only in the page cache."""


def recover_log(
    files: Files,
    visitor: Visitor,
    *,
    start: int = 0,
    durable: int = 0,
    trusts_barriers: bool = True,
) -> RecoveredLog:
    """
    Read the log from the record at position `start` to its end, and prepare it for further writes.

    Args:
        durable: a position up to which the log is known to have been durable.
        trusts_barriers: False for a copy, whose BARRIER records say what was durable at the broker.

    Raises:
        DataFolderError: a newer broker wrote this log, the log is missing, or a file that has the
            name of a segment does not belong to the log.
    """
    files.make_folder(FOLDER)
    scan = _Scan(files, visitor, start=start, durable=durable, trusts_barriers=trusts_barriers)
    recovered_log = scan.run()
    last_base = recovered_log.bases[-1]
    if files.size(segment_path(last_base)) is None:
        return recovered_log
    if recovered_log.cut_bytes:
        _save_cut_records(files, last_base, recovered_log.end, recovered_log.cut_bytes)
    # The last segment may be a sealed one, if all later segments were lost.
    files.unprotect(segment_path(last_base))
    file = files.open_append(segment_path(last_base))
    try:
        if recovered_log.cut_bytes:
            log.warning(
                "cut %s of an unfinished write at position %d",
                counted(recovered_log.cut_bytes, "byte"),
                recovered_log.end,
            )
        if recovered_log.cut_bytes or recovered_log.reserved_bytes:
            file.truncate(recovered_log.end - last_base)
        maybe_unsynced_from = max(recovered_log.maybe_unsynced_from, last_base)
        rewrite_in_place(
            files,
            segment_path(last_base),
            file,
            start=maybe_unsynced_from - last_base,
            end=recovered_log.end - last_base,
        )
        file.fdatasync()
    finally:
        file.close()
    return recovered_log


def scan_log(files: Files, visitor: Visitor, *, start: int = 0, durable: int = 0) -> RecoveredLog:
    """Read the log like `recover_log`, but without changing anything. Bytes that would be cut are
    only counted.
    """
    return _Scan(files, visitor, start=start, durable=durable, trusts_barriers=True).run()


def visit_records(files: Files, visitor: Visitor, *, start: int, end: int) -> tuple[int, bool]:
    """Visit the records in `[start, end)`, of a log to which more may be appended meanwhile. Return
    the position at which this has stopped, and False if the record there is damaged.
    """
    scan = _Scan(files, visitor, start=start, durable=0, trusts_barriers=False)
    return scan.visit_until(end)


class _Scan:
    """One pass over the log."""

    def __init__(
        self, files: Files, visitor: Visitor, *, start: int, durable: int, trusts_barriers: bool
    ) -> None:
        self._files = files
        self._visitor = visitor
        self._trusts_barriers = trusts_barriers
        self._bases = segment_bases(files)
        self._trails = trail_bases(files)
        self._position = start if start or not self._bases else self._bases[0]
        """The current position."""
        self._barrier = 0
        """The position of the newest record with BARRIER. Every byte before it was durable."""
        self._durable_end = max(
            [durable, *(durable_end(files, base) for base in self._trails[-1:])]
        )
        """The position up to which the trail or a snapshot proves that the log was durable."""
        self._cursors = {base: TrailCursor(files, base) for base in self._trails}

    def run(self) -> RecoveredLog:
        """Visit the records and holes of all segments."""
        self._check_segments()
        self._report_missing_before_start()
        if self._bases and self._position < self._bases[0]:
            self._report_hole(self._bases[0], "a segment is missing")
        for base, next_base in pairwise(self._bases):
            end = min(base + (self._files.size(segment_path(base)) or 0), next_base)
            while self._position < next_base:
                problem = self._read_records(base, end)
                if self._position < next_base:
                    intact = self._next_intact(base)
                    self._report_hole(
                        intact or next_base, problem or "a segment is missing or truncated"
                    )
        return self._scan_last_segment()

    def visit_until(self, end: int) -> tuple[int, bool]:
        """See `visit_records`."""
        for base, next_base in pairwise([*self._bases, end]):
            size = self._files.size(segment_path(base)) or 0
            if base <= self._position < min(next_base, end):
                self._read_records(base, min(next_base, end, base + size))
                if self._position < next_base < end:
                    return self._position, False
        return self._position, True

    def _check_segments(self) -> None:
        """Raise DataFolderError if the log is missing, or if its last file begins beyond any end
        that the log has ever had.
        """
        reached_end = max(self._position, self._durable_end)
        if not self._bases and not self._trails and reached_end:
            raise DataFolderError(
                f"{self._files.name()}/{FOLDER} has no segments, but according to a snapshot the "
                f"log reached position {reached_end}: put {FOLDER}/ back",
                path=FOLDER,
            )
        if len(self._bases) < 2:
            return
        previous_base, last_base = self._bases[-2:]
        end = previous_base + (self._files.size(segment_path(previous_base)) or 0)
        if (
            end < last_base
            and self._durable_end < last_base
            and self._first_intact(last_base) is None
        ):
            raise DataFolderError(
                f"{self._files.name()}/{segment_path(last_base)} does not belong to the log, which "
                f"ends at position {end}: move the file away",
                path=segment_path(last_base),
            )

    def _first_intact(self, base: int) -> Header | None:
        return next(intact_records(self._files, base, base), None)

    def _report_missing_before_start(self) -> None:
        """Report missing bytes in the segments that precede the start, whose records are not
        read.
        """
        start = self._position
        bases = self._bases or [self._trails[0] if self._trails else 0]
        for base, next_base in pairwise([*bases, start]):
            end = base + (self._files.size(segment_path(base)) or 0)
            if end < next_base <= start:
                self._position = end
                self._report_hole(next_base, "a segment is missing or truncated")
        self._position = start

    def _scan_last_segment(self) -> RecoveredLog:
        """
        Read the last segment. Only this one may end in an unfinished write.

        Returns:
            The recovered log. It ends after the last intact record or, if durable bytes are missing
            there, after these, where a new segment begins.
        """
        base = self._bases[-1] if self._bases else self._position
        end = base + (self._files.size(segment_path(base)) or 0)
        # If bytes that are not a record are followed by an intact record which lies below the known
        # durable end, or has BARRIER, they were durable, and are a hole. Otherwise they are an
        # unfinished write, and are cut.
        while (problem := self._read_records(base, end)) is not None:
            intact = self._next_intact(base)
            if intact is not None and (intact < self._durable_end or self._barrier_follows(base)):
                self._report_hole(intact, problem)
            elif self._position < self._durable_end:
                break
            else:
                return self._build_result(end)
        if self._position < self._durable_end:
            self._report_hole(self._durable_end, problem or "the end is missing")
        if self._position > end or not self._bases:
            self._bases.append(self._position)
        return self._build_result(end)

    def _build_result(self, end: int) -> RecoveredLog:
        """Return the log that ends at the current position, even though its last file ends at
        `end`.
        """
        base = self._bases[-1]
        written_position = (
            written_end(self._files, base, self._position, end)
            if self._position < end
            else self._position
        )
        return RecoveredLog(
            bases=self._bases,
            end=self._position,
            cut_bytes=written_position - self._position,
            reserved_bytes=max(0, end - written_position),
            maybe_unsynced_from=max(self._durable_end, self._barrier),
        )

    def _read_records(self, base: int, end: int) -> str | None:
        """Visit intact records up to `end`. Return the problem at which this stopped, or None if it
        reached `end`.
        """
        path = segment_path(base)
        next_length = READ_BYTES
        while self._position < end:
            length = min(max(next_length, READ_BYTES), end - self._position)
            ahead = self._position + length
            if ahead < end:
                self._files.read_ahead(path, ahead - base, AHEAD_BYTES)
            data = self._files.pread(path, self._position - base, length)
            view = memoryview(data)
            start = 0
            while True:
                header = read_record(data, start)
                if not isinstance(header, Header):
                    break
                if header.position != self._position + start:
                    header = InvalidRecord(f"a record of position {header.position}")
                    break
                if header.flags & BARRIER and self._trusts_barriers:
                    self._barrier = header.position
                self._visitor.on_record(header, view[start + HEADER_BYTES : start + header.length])
                start += header.length
            self._position += start
            if isinstance(header, InvalidRecord):
                if header.reason.startswith("version"):
                    raise DataFolderError(
                        f"{self._files.name()} was written by a newer broker: "
                        f"{header.reason} of the record at position {self._position}"
                    )
                return header.reason
            next_length = header.wanted
            if self._position < end < self._position + next_length:
                return "a record is truncated"
        return None

    def _report_hole(self, end: int, reason: str) -> None:
        """Report the hole from the current position to `end`, in parts, and move the position to
        `end`.
        """
        damage = self._position, end
        part_start = known_end = self._position
        lost_records: list[TrailEntry] = []

        def report_part(end: int, *, explained: bool) -> None:
            nonlocal part_start
            if part_start < end:
                self._visitor.on_hole(
                    Hole(
                        start=part_start,
                        end=end,
                        reason=reason,
                        lost_records=tuple(lost_records),
                        explained=explained,
                        damage=damage,
                    )
                )
                lost_records.clear()
                part_start = end

        for record in self._lost_records(known_end, end):
            position = record.header.position
            if position > known_end:
                report_part(known_end, explained=True)
                report_part(position, explained=False)
            lost_records.append(record)
            known_end = position + record.header.length
            if len(lost_records) >= LOST_RECORDS_MAX and known_end <= end:
                report_part(known_end, explained=True)
        report_part(min(known_end, end), explained=known_end <= end)
        report_part(end, explained=False)
        self._position = end

    def _lost_records(self, start: int, end: int) -> Iterator[TrailEntry]:
        """Yield the known lost records in `[start, end)`, in the order of the log, from the trail
        and from intact headers.
        """
        known_end = start
        for entry in self._trail_entries(start, end):
            position = entry.header.position
            if position < known_end:
                continue
            for header in self._header_chain(known_end, position):
                yield TrailEntry(header, None)
            yield entry
            known_end = position + entry.header.length
        for header in self._header_chain(known_end, end):
            yield TrailEntry(header, None)

    def _trail_entries(self, start: int, end: int) -> Iterator[TrailEntry]:
        for index, base in enumerate(self._trails):
            last = index + 1 == len(self._trails)
            if base < end and (last or start < self._trails[index + 1]):
                yield from self._cursors[base].entries_between(start, end)

    def _header_chain(self, start: int, end: int) -> Iterator[Header]:
        """Yield consecutive intact headers from `start` on. The length in each header leads to the
        next one.
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

    def _next_intact(self, base: int) -> int | None:
        """Return the position of the first intact record after the damage, or None."""
        return next((header.position for header in self._intact_after_damage(base)), None)

    def _barrier_follows(self, base: int) -> bool:
        return self._trusts_barriers and any(
            header.flags & BARRIER for header in self._intact_after_damage(base)
        )

    def _intact_after_damage(self, base: int) -> Iterator[Header]:
        """Yield a segment's intact records after the damage at the current position."""
        header = read_header(
            self._files.pread(segment_path(base), self._position - base, HEADER_BYTES)
        )
        position = self._position + 1
        if isinstance(header, Header) and header.position == self._position:
            position = (
                self._position + header.length
            )  # the body may contain bytes that look like records
        return intact_records(self._files, base, position)


def written_end(files: Files, base: int, start: int, end: int) -> int:
    """Return the position that follows the last nonzero byte in `[start, end)` of a segment, or
    `start` if all bytes are zero.
    """
    path = segment_path(base)
    while start < end:
        chunk_start = max(start, end - READ_BYTES)
        data = files.pread(path, chunk_start - base, end - chunk_start).rstrip(b"\0")
        if data:
            return chunk_start + len(data)
        end = chunk_start
    return start


def intact_records(files: Files, base: int, position: int) -> Iterator[Header]:
    """Yield the headers of a segment's intact records at or after `position`, skipping
    other bytes.
    """
    path = segment_path(base)
    size = files.size(path) or 0
    chunk_start = position - base
    while chunk_start < size:
        data = files.pread(path, chunk_start, READ_BYTES + RECORD_BYTES_MAX)
        start = data.find(_MAGIC_BYTES)
        while 0 <= start < READ_BYTES:
            header = read_record(data, start)
            step = 1
            if isinstance(header, Header) and header.position == base + chunk_start + start:
                yield header
                step = header.length
            start = data.find(_MAGIC_BYTES, start + step)
        chunk_start += READ_BYTES if start < 0 else start


def _save_cut_records(files: Files, base: int, position: int, length: int) -> None:
    """Copy an unfinished write of `length` bytes, which is about to be cut, to a file if it
    contains intact records.
    """
    intact = sum(1 for _ in intact_records(files, base, position))
    if not intact:
        return
    path = segment_path(base)
    start, end = position - base, position - base + length
    parts = (
        [files.pread(path, chunk_start, min(READ_BYTES, end - chunk_start))]
        for chunk_start in range(start, end, READ_BYTES)
    )
    replace_large_file(files, f"cut-{position:020d}.bin", parts)
    log.warning(
        "saved %d intact records of the unfinished write in cut-%020d.bin", intact, position
    )
