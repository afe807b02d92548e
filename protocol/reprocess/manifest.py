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
    """The offsets `[start, end)` of a partition, whose order in the subject is (`queue`,
    `epoch`).
    """

    partition_id: Count
    start: Count
    end: Count
    queue: Count = 0
    epoch: Count = 0
    """The depth of the partition in the lineage."""


class JobPiece(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A part of a range whose output has been stored by the job."""

    partition_id: Count
    start: Count
    end: Count
    rows: Count
    """The number of output rows."""
    digest: str
    """The digest of the output rows. It is computed by column, so it does not depend on how the
    rows are divided into batches.
    """
    file: str
    """The name of the file in the folder; "" if the rows are in a subject."""
    code: str = ""
    """The code of the earlier run that produced it; "" stands for the code of the manifest."""
    parked: Count = 0
    """The number of messages without a row, because the function failed for them."""


class SubjectOutput(Struct, frozen=True, kw_only=True):
    """The target subject of the rows, and the hidden subject that contains the rows until it is
    published.
    """

    target: str
    hidden: str
    subject_id: Count = 0
    """The id of the hidden subject, which distinguishes it from others with the same name; 0 if it
    has not been created yet.
    """
    published: bool = True
    """True if the job publishes it; False if an operator does, with `keylane subject publish`."""
    messages: dict[Count, Count] | UnsetType = UNSET
    """Maps the partitions of the hidden subject to their numbers of messages, once the job is
    complete. The messages begin at offset 0.
    """


class Manifest(Struct, frozen=True, kw_only=True):
    """The plan and the progress of a job."""

    job: str
    code: str
    """The code of the latest run that had pieces to process, as module:function@digest. The digest
    covers the function's source and the modules that it imports.
    """
    subject: str
    planned_at_ms: Count
    """When the job was planned, by the wall clock of the planning program, in milliseconds since
    1970.
    """
    ranges: tuple[SourceRange, ...]
    piece_rows: Annotated[int, Meta(ge=1)]
    pieces: tuple[JobPiece, ...] = ()
    format: int = FORMAT
    output: SubjectOutput | UnsetType = UNSET
    """The output subject; unset if the output consists of Parquet files."""
    earlier_codes: tuple[str, ...] | UnsetType = UNSET
    """The codes of earlier runs, whose pieces remain valid."""

    @property
    def mark(self) -> str:
        """The mark of pieces of the current run: its code, and the hidden subject that contains its
        rows.
        """
        return self._mark(self.code)

    @property
    def earlier_marks(self) -> dict[str, str]:
        """Maps the marks of pieces of earlier runs that remain valid to the codes of these runs."""
        return {self._mark(code): code for code in self.earlier_codes or ()}

    def _mark(self, code: str) -> str:
        return f"{code}#{self.output.subject_id}" if self.output else code

    @property
    def parked(self) -> int:
        """The number of messages without a row, in all pieces."""
        return sum(piece.parked for piece in self.pieces)

    @property
    def rows_in(self) -> int:
        """The total number of messages in the ranges."""
        return sum(each.end - each.start for each in self.ranges)

    @property
    def rows_out(self) -> int:
        """The total number of rows in the pieces."""
        return sum(piece.rows for piece in self.pieces)


_decoder = msgspec.json.Decoder(Manifest)


def encode_manifest(manifest: Manifest) -> bytes:
    """Encode the manifest as indented JSON."""
    return msgspec.json.format(msgspec.json.encode(manifest), indent=1) + b"\n"


def decode_manifest(data: bytes, *, where: str) -> Manifest:
    """
    Decode a manifest.

    Raises:
        JobError: the bytes are not a manifest, or were written by a newer program.
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
    """Return the pieces that are not done yet, each with at most `piece_rows` messages, in the
    order of the ranges.
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
    Return a dict that maps partition ids to the offsets at which live reading continues after the
    backfill.

    Partitions that are not listed were opened later, and are read from their first message.

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
        JobError: the backfill belongs to another subject, is not complete, or has no partitions.
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
"""The property of a row that contains the partition and offset of the message from which the row
was produced.
"""


def parse_source(row: Message[Any]) -> tuple[int, int] | None:
    """Return the partition id and the offset of the message from which a row was produced, or None
    if its properties do not contain them.
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
