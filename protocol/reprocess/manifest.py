"""The manifest of reprocessed messages: which ranges, by which code, with how many rows and which
digests.  Pure.

    {"format": 1, "job": …, "code": …, "subject": …, "planned_at_ms": …, "ranges": [{partition_id,
    start, end, …}, …],
     "pieces": [{partition_id, start, end, rows, digest, file, code, parked}, …], "earlier_codes":
         […],
     "output": {target, hidden, subject_id, published, messages}}

Invariants
    The ranges are fixed when the job is planned, and half-open: what is live begins at `end` of
    each. A manifest is whole if its pieces cover every range, without a gap or an overlap.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from ..errors import JobError, Reason
from ..groups import GroupStart, StartAt
from ..ids import MAX_I64

FORMAT = 1
Count = Annotated[int, Meta(ge=0, le=MAX_I64)]


class SourceRange(Struct, frozen=True, kw_only=True):
    """Offsets `[start, end)` of a partition, and its place in the order of the subject."""

    partition_id: Count
    start: Count
    end: Count
    queue: Count = 0
    epoch: Count = 0
    """Depth in the lineage."""


class JobPiece(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A part of a range, reprocessed by one call chain of the job, and stored."""

    partition_id: Count
    start: Count
    end: Count
    rows: Count
    """Rows of output."""
    digest: str
    """Of the rows of output, by column, whatever the batches they came in."""
    file: str
    """Name of the file, in the folder; "": the rows are in a subject."""
    code: str = ""
    """The earlier code under which it was made; "": that of the manifest."""
    parked: Count = 0
    """Messages of which the function made no row, because it failed."""


class SubjectOutput(Struct, frozen=True, kw_only=True):
    """The subject that the rows are written for, and the hidden one that has them until it is
    published.
    """

    target: str
    hidden: str
    subject_id: Count = 0
    """Of the hidden subject; 0: it is not made yet.  Another subject of its name lacks the rows."""
    published: bool = True
    """The job publishes it; False: it is left to `keylane subject publish`."""
    messages: dict[Count, Count] | UnsetType = UNSET
    """Partition of the hidden subject → messages of the job, which begin at offset 0; of a job that
    is complete.
    """


class Manifest(Struct, frozen=True, kw_only=True):
    """What a job was to do, and has done."""

    job: str
    code: str
    """module:function@digest of its source and of what that imports, of the latest run that had
    pieces to do.
    """
    subject: str
    planned_at_ms: Count
    """Milliseconds since 1970, by the calendar of the program that planned."""
    ranges: tuple[SourceRange, ...]
    piece_rows: Annotated[int, Meta(ge=1)]
    pieces: tuple[JobPiece, ...] = ()
    format: int = FORMAT
    output: SubjectOutput | UnsetType = UNSET
    """Of rows that are no Parquet files."""
    earlier_codes: tuple[str, ...] | UnsetType = UNSET
    """Codes of earlier runs, whose pieces count."""

    @property
    def mark(self) -> str:
        """What a piece says of itself that is made now: its code, and which hidden subject has its
        rows.
        """
        return self._mark(self.code)

    @property
    def earlier_marks(self) -> dict[str, str]:
        """What pieces of earlier runs that count say of themselves → their code."""
        return {self._mark(code): code for code in self.earlier_codes or ()}

    def _mark(self, code: str) -> str:
        return f"{code}#{self.output.subject_id}" if self.output else code

    @property
    def parked(self) -> int:
        """Messages of which no row was made."""
        return sum(piece.parked for piece in self.pieces)

    @property
    def rows_in(self) -> int:
        """Messages of the ranges."""
        return sum(each.end - each.start for each in self.ranges)

    @property
    def rows_out(self) -> int:
        """Rows of the pieces."""
        return sum(piece.rows for piece in self.pieces)


_decoder = msgspec.json.Decoder(Manifest)


def encode_manifest(manifest: Manifest) -> bytes:
    """The manifest as JSON, for people to read."""
    return msgspec.json.format(msgspec.json.encode(manifest), indent=1) + b"\n"


def decode_manifest(data: bytes, *, where: str) -> Manifest:
    """
    The manifest of these bytes.

    Raises:
        JobError: they are none, or a newer program wrote them.
    """
    try:
        manifest = _decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise JobError(Reason.MANIFEST, f"{where} is no manifest: {error}", path=where) from None
    if manifest.format != FORMAT:
        raise JobError(
            Reason.MANIFEST,
            f"{where} is a manifest of format {manifest.format}: a newer keylane wrote it",
            path=where,
        )
    if len({each.partition_id for each in manifest.ranges}) != len(manifest.ranges):
        raise JobError(Reason.MANIFEST, f"{where} names a partition twice", path=where)
    return manifest


def with_code(manifest: Manifest, code: str) -> Manifest:
    """The manifest of a job that goes on under this code; its pieces of before count."""
    earlier = [each for each in (*(manifest.earlier_codes or ()), manifest.code) if each != code]
    return msgspec.structs.replace(
        manifest, code=code, earlier_codes=tuple(dict.fromkeys(earlier)) or UNSET
    )


def missing_pieces(manifest: Manifest, done: Sequence[JobPiece]) -> list[SourceRange]:
    """The ranges, of `piece_rows` messages at most, that no piece covers; by partition and
    offset.
    """
    covered = {(piece.partition_id, piece.start, piece.end) for piece in done}
    return [
        piece
        for whole in manifest.ranges
        for piece in cut_range(whole, manifest.piece_rows)
        if (piece.partition_id, piece.start, piece.end) not in covered
    ]


def cut_range(whole: SourceRange, piece_rows: int) -> list[SourceRange]:
    """The range in pieces of at most `piece_rows` messages, at the same offsets each time."""
    starts = range(whole.start, whole.end, piece_rows)
    return [
        msgspec.structs.replace(whole, start=start, end=min(start + piece_rows, whole.end))
        for start in starts
    ]


def live_offsets(manifest: Manifest, *, where: str) -> dict[int, int]:
    """
    Partition id → the offset at which live reading goes on where the backfill ended.

    A partition that is not named is one that was opened later: it is read from its first message.

    Raises:
        JobError: the backfill is not complete.
    """
    missing = missing_pieces(manifest, manifest.pieces)
    if missing:
        first = missing[0]
        raise JobError(
            Reason.MANIFEST,
            f"{where} is not complete: {len(missing)} pieces are missing, the first is "
            f"[{first.start}, {first.end}) of partition {first.partition_id}",
            path=where,
        )
    return {each.partition_id: each.end for each in manifest.ranges}


def group_start_of(manifest: Manifest, *, subject: str, where: str) -> GroupStart:
    """
    Where a consumer group begins that goes on behind a backfill.

    Raises:
        JobError: the backfill is of another subject, or not complete, or has no partition.
    """
    if manifest.subject != subject:
        raise JobError(
            Reason.MANIFEST,
            f"{where} is of subject {manifest.subject}, not of {subject}",
            path=where,
        )
    offsets = live_offsets(manifest, where=where)
    if not offsets:
        raise JobError(Reason.MANIFEST, f"{where} has no partition", path=where)
    return GroupStart(at=StartAt.CURSORS, at_ms=manifest.planned_at_ms, cursors=offsets)
