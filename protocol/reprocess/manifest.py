"""The manifest of a reprocessing job: its ranges, its code, and the rows and digests of its output.
Pure.

    {"format": 1, "job": …, "code": …, "subject": …, "planned_at_ms": …,
     "ranges": [{partition_id, start, end, …}, …],
     "pieces": [{partition_id, start, end, rows, digest, file, code, parked}, …],
     "earlier_codes": […],
     "output": {target, hidden, subject_id, published, messages}}

Invariants
    The ranges are half-open, and fixed when the job is planned: live reading begins at the `end` of
    each.
    A manifest is complete if its pieces cover every range, without gaps or overlaps.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from ..errors import CorruptBatchError, JobError, Reason
from ..groups import GroupStart, StartAt
from ..ids import MAX_I64
from ..message import Message

FORMAT = 1
Count = Annotated[int, Meta(ge=0, le=MAX_I64)]


class SourceRange(Struct, frozen=True, kw_only=True):
    """Offsets `[start, end)` of a partition, whose order in the subject is (`queue`, `epoch`)."""

    partition_id: Count
    start: Count
    end: Count
    queue: Count = 0
    epoch: Count = 0
    """Depth of the partition in the lineage."""


class JobPiece(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A part of a range for which the job has stored its output."""

    partition_id: Count
    start: Count
    end: Count
    rows: Count
    """Number of rows of output."""
    digest: str
    """Digest of the output rows, computed by column, independent of their batches."""
    file: str
    """Name of the file in the folder; "": the rows are in a subject."""
    code: str = ""
    """Code of the earlier run that produced it; "": the code of the manifest."""
    parked: Count = 0
    """Number of messages without a row, because the function failed for them."""


class SubjectOutput(Struct, frozen=True, kw_only=True):
    """The target subject of the rows, and the hidden subject that contains them until it is
    published.
    """

    target: str
    hidden: str
    subject_id: Count = 0
    """Id of the hidden subject, which distinguishes it from others of its name; 0: not created
    yet.
    """
    published: bool = True
    """True if the job publishes it; False: an operator does, with `keylane subject publish`."""
    messages: dict[Count, Count] | UnsetType = UNSET
    """Number of messages by partition of the hidden subject, once the job is complete. They begin
    at offset 0.
    """


class Manifest(Struct, frozen=True, kw_only=True):
    """The plan and the progress of a job."""

    job: str
    code: str
    """Code of the latest run that had pieces to process, as module:function@digest. The digest
    covers its source and the modules that it imports.
    """
    subject: str
    planned_at_ms: Count
    """Milliseconds since 1970, by the wall clock of the planning program."""
    ranges: tuple[SourceRange, ...]
    piece_rows: Annotated[int, Meta(ge=1)]
    pieces: tuple[JobPiece, ...] = ()
    format: int = FORMAT
    output: SubjectOutput | UnsetType = UNSET
    """Output subject; unset if the output is Parquet files."""
    earlier_codes: tuple[str, ...] | UnsetType = UNSET
    """Codes of earlier runs, whose pieces remain valid."""

    @property
    def mark(self) -> str:
        """Mark of pieces of the current run: its code, and the hidden subject that contains its
        rows.
        """
        return self._mark(self.code)

    @property
    def earlier_marks(self) -> dict[str, str]:
        """Codes of earlier runs whose pieces remain valid, by the mark of these pieces."""
        return {self._mark(code): code for code in self.earlier_codes or ()}

    def _mark(self, code: str) -> str:
        return f"{code}#{self.output.subject_id}" if self.output else code

    @property
    def parked(self) -> int:
        """Number of messages without a row, in all pieces."""
        return sum(piece.parked for piece in self.pieces)

    @property
    def rows_in(self) -> int:
        """Number of messages in the ranges."""
        return sum(each.end - each.start for each in self.ranges)

    @property
    def rows_out(self) -> int:
        """Number of rows in the pieces."""
        return sum(piece.rows for piece in self.pieces)


_decoder = msgspec.json.Decoder(Manifest)


def encode_manifest(manifest: Manifest) -> bytes:
    """Encode the manifest as indented JSON."""
    return msgspec.json.format(msgspec.json.encode(manifest), indent=1) + b"\n"


def decode_manifest(data: bytes, *, where: str) -> Manifest:
    """
    Decode a manifest.

    Raises:
        JobError: the bytes are not a manifest, or a newer program wrote them.
    """
    try:
        manifest = _decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise JobError(Reason.MANIFEST, f"{where} is not a manifest: {error}", path=where) from None
    if manifest.format != FORMAT:
        raise JobError(
            Reason.MANIFEST,
            f"{where} is a manifest of format {manifest.format}: a newer keylane wrote it",
            path=where,
        )
    if len({each.partition_id for each in manifest.ranges}) != len(manifest.ranges):
        raise JobError(Reason.MANIFEST, f"{where} names a partition twice", path=where)
    return manifest


def continue_with_code(manifest: Manifest, code: str) -> Manifest:
    """Return the manifest for a job that continues with this code. Its earlier pieces remain
    valid.
    """
    earlier = [each for each in (*(manifest.earlier_codes or ()), manifest.code) if each != code]
    return msgspec.structs.replace(
        manifest, code=code, earlier_codes=tuple(dict.fromkeys(earlier)) or UNSET
    )


def missing_pieces(manifest: Manifest, done: Sequence[JobPiece]) -> list[SourceRange]:
    """Return the pieces of at most `piece_rows` messages that are not done yet, in the order of the
    ranges.
    """
    covered = {(piece.partition_id, piece.start, piece.end) for piece in done}
    return [
        piece
        for whole in manifest.ranges
        for piece in cut_range(whole, manifest.piece_rows)
        if (piece.partition_id, piece.start, piece.end) not in covered
    ]


def cut_range(whole: SourceRange, piece_rows: int) -> list[SourceRange]:
    """Split a range into pieces of at most `piece_rows` messages, always at the same offsets."""
    starts = range(whole.start, whole.end, piece_rows)
    return [
        msgspec.structs.replace(whole, start=start, end=min(start + piece_rows, whole.end))
        for start in starts
    ]


def live_offsets(manifest: Manifest, *, where: str) -> dict[int, int]:
    """
    Return the offsets at which live reading continues after the backfill, by partition id.

    Other partitions were opened later, and are read from their first message.

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


def build_group_start(manifest: Manifest, *, subject: str, where: str) -> GroupStart:
    """
    Return the start of a consumer group that continues after a backfill.

    Raises:
        JobError: the backfill is of another subject, is not complete, or has no partition.
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


SOURCE = "keylane.source"
"""Property of a row: the partition and the offset of the message from which it was produced."""


def parse_source(row: Message[Any]) -> tuple[int, int] | None:
    """Return the partition id and the offset of the message from which a row was produced; None if
    its properties do not contain them.
    """
    try:
        text = row.properties.get(SOURCE)
    except CorruptBatchError:
        return None
    if not isinstance(text, str):
        return None
    partition_id, _, offset = text.partition("/")
    if not (_is_number(partition_id) and _is_number(offset)):
        return None
    return int(partition_id), int(offset)


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit()
