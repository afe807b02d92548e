"""Compares the output of a job with that of another job, or with a subject. Performs network I/O.

    two folders of files          compare table by table (`comparing.py`)
    at least one subject          match rows by the messages from which they were made
                                  (`compared_rows.py`), some pieces at a time

Pieces with equal digests are not read.

Invariants
    At most the rows of `ROUND_ROWS` messages, or of one piece, are in memory at a time, as five
    numbers per row.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import numpy as np
import pyarrow as pa

from ...arrow.reading import read
from ...protocol.errors import JobError, PartitionUnknownError, Reason, SubjectUnknownError
from ...protocol.reprocess.manifest import JobPiece, Manifest, live_offsets
from .compared_rows import (
    ComparedRows,
    RowDifferences,
    compared_rows,
    differing_keys,
    select_pieces,
)
from .comparing import KeyDifference, find_differences
from .folder import MANIFEST, OutputFolder
from .messages import to_messages

ROUND_ROWS = 5_000_000
SUBJECT = "subject:"
COLUMNS = ("partition", "offset", "key", "value", "timestamp", "properties")


def compare_outputs(meta: str, old: str, new: OutputFolder) -> list[KeyDifference]:
    """
    Return the keys for which the output of a job differs from an older output, sorted by source
    partition and first offset. This blocks.

    Args:
        meta: "host:port" of a metaserver, or several separated by commas.
        old: the folder of another job, or subject:NAME. Only rows that were made from the job's
            ranges are compared. If the job has read the subject, its messages are compared instead.
        new: the folder of the job.

    Raises:
        JobError: an output is incomplete, the two have different ranges, or rows were removed or do
            not name the messages that they were made from.
        KeylaneError: reading fails.
    """
    new_manifest = read_complete_manifest(new)
    if old.startswith(SUBJECT):
        name = old.removeprefix(SUBJECT)
        pairs = [(piece, piece) for piece in new_manifest.pieces]
        old_side: _Side = _Subject(
            meta, name, new_manifest if name == new_manifest.subject else None
        )
        return _merge(_compare_rows(old_side, _output_of(meta, new, new_manifest), pairs))
    folder = OutputFolder(old)
    old_manifest = read_complete_manifest(folder)
    pairs = [
        (old_piece, new_piece)
        for old_piece, new_piece in _pair_pieces(folder, old_manifest, new, new_manifest)
        if old_piece.digest != new_piece.digest
    ]
    if old_manifest.output or new_manifest.output:
        return _merge(
            _compare_rows(
                _output_of(meta, folder, old_manifest), _output_of(meta, new, new_manifest), pairs
            )
        )
    return _merge(
        each
        for old_piece, piece in pairs
        for each in find_differences(
            piece.partition_id, folder.read_rows(old_piece), new.read_rows(piece)
        )
    )


def _merge(differences: Iterable[KeyDifference]) -> list[KeyDifference]:
    """Merge the differences of each partition and key, and sort them by partition and first
    offset.
    """
    merged: dict[tuple[int, object], KeyDifference] = {}
    for each in differences:
        key = each.partition_id, each.key
        other = merged.get(key)
        if other is not None:
            offsets = (other.first_offset, each.first_offset)
            first = min((offset for offset in offsets if offset is not None), default=None)
            merged[key] = replace(other, first_offset=first, rows=other.rows + each.rows)
        else:
            merged[key] = each
    return sorted(
        merged.values(),
        key=lambda each: (each.partition_id, each.first_offset is None, each.first_offset or 0),
    )


def read_complete_manifest(folder: OutputFolder) -> Manifest:
    """Return the manifest of a complete job. Raises JobError if the job is incomplete."""
    manifest = folder.read(MANIFEST)
    if manifest is None:
        raise JobError(Reason.MANIFEST, f"{folder.path} is not complete", path=str(folder.path))
    live_offsets(manifest, where=str(folder.path))
    return manifest


def _pair_pieces(
    old: OutputFolder, old_manifest: Manifest, new: OutputFolder, new_manifest: Manifest
) -> list[tuple[JobPiece, JobPiece]]:
    """Return pairs of the old and new piece for each range. Raises JobError if the ranges
    differ.
    """
    pieces = {(each.partition_id, each.start, each.end): each for each in old_manifest.pieces}
    if pieces.keys() != {(each.partition_id, each.start, each.end) for each in new_manifest.pieces}:
        raise JobError(
            Reason.MANIFEST,
            f"{old.path} and {new.path} have different ranges: reprocess both with the same "
            "--start and --end",
            path=str(old.path),
        )
    return [(pieces[each.partition_id, each.start, each.end], each) for each in new_manifest.pieces]


class _Side(ABC):
    """One of the two outputs that are compared: its rows, and how to read them."""

    location = ""
    is_source = False
    planned_us: int | None = None

    @abstractmethod
    def batches(self, pieces: Sequence[JobPiece]) -> Iterator[pa.RecordBatch]:
        """Yield the rows that were made from messages of these pieces; other rows may be among
        them.
        """

    def rows(self, pieces: Sequence[JobPiece]) -> Iterator[tuple[pa.RecordBatch, ComparedRows]]:
        """Yield each batch, together with its rows in comparable form."""
        for batch in self.batches(pieces):
            if batch.num_rows:
                yield (
                    batch,
                    compared_rows(
                        batch,
                        is_source=self.is_source,
                        planned_us=self.planned_us,
                        where=self.location,
                    ),
                )


class _Files(_Side):
    """The Parquet files of a folder, read as messages."""

    def __init__(self, folder: OutputFolder, manifest: Manifest) -> None:
        self._folder = folder
        self._job = manifest.job
        self.location = str(folder.path)

    def batches(self, pieces: Sequence[JobPiece]) -> Iterator[pa.RecordBatch]:
        for piece in pieces:
            try:
                rows = to_messages(self._folder.read_rows(piece), job=self._job, piece=piece)
            except JobError as error:
                raise JobError(
                    Reason.OUTPUTS_DIFFER, f"{self.location}: {error.message}", path=self.location
                ) from None
            yield from rows.to_batches()


class _Subject(_Side):
    """The messages of a subject: the rows of a job, or the messages that the job has read."""

    def __init__(self, meta: str, name: str, manifest: Manifest | None) -> None:
        self._meta = meta
        self._name = name
        self._manifest = manifest
        self.is_source = manifest is not None
        self.location = f"{SUBJECT}{name}"

    def batches(self, pieces: Sequence[JobPiece]) -> Iterator[pa.RecordBatch]:
        if self._manifest is None:
            yield from read(self._meta, self._name, columns=COLUMNS)
            return
        starts: dict[int, int] = {}
        ends: dict[int, int] = {}
        for piece in pieces:
            starts[piece.partition_id] = min(
                piece.start, starts.get(piece.partition_id, piece.start)
            )
            ends[piece.partition_id] = max(piece.end, ends.get(piece.partition_id, 0))
        yield from _read_ranges(self._meta, self._name, starts, ends, where=self.location)


class _JobRows(_Side):
    """The rows that a job has stored in a subject, which may be hidden or already published."""

    def __init__(self, meta: str, folder: OutputFolder, manifest: Manifest) -> None:
        assert manifest.output
        self._meta = meta
        self._output = manifest.output
        self.location = str(folder.path)
        self.planned_us = manifest.planned_at_ms * 1_000

    def batches(self, pieces: Sequence[JobPiece]) -> Iterator[pa.RecordBatch]:
        output = self._output
        if not output.messages and output.messages != {}:
            raise JobError(
                Reason.OUTPUTS_DIFFER,
                f"{self.location} does not say where the rows are: an older keylane made it",
                path=self.location,
            )
        ends = {number: count for number, count in output.messages.items() if count}
        starts = dict.fromkeys(ends, 0)
        try:
            yield from _read_ranges(self._meta, output.hidden, starts, ends, where=self.location)
        except SubjectUnknownError:  # it was published
            yield from _read_ranges(self._meta, output.target, starts, ends, where=self.location)


def _read_ranges(
    meta: str, subject: str, starts: dict[int, int], ends: dict[int, int], *, where: str
) -> Iterator[pa.RecordBatch]:
    if not ends:
        return
    try:
        yield from read(meta, subject, partitions=ends, start=starts, end=ends, columns=COLUMNS)
    except PartitionUnknownError as error:
        raise JobError(
            Reason.OUTPUTS_DIFFER,
            f"{where}: rows are no longer in {subject!r}: {error.message}",
            path=where,
        ) from None


def _output_of(meta: str, folder: OutputFolder, manifest: Manifest) -> _Side:
    return _JobRows(meta, folder, manifest) if manifest.output else _Files(folder, manifest)


def _compare_rows(
    old: _Side, new: _Side, pairs: Sequence[tuple[JobPiece, JobPiece]]
) -> Iterator[KeyDifference]:
    for round_pairs in split_into_rounds(pairs):
        old_rows, new_rows = (
            [old_piece for old_piece, _ in round_pairs],
            [piece for _, piece in round_pairs],
        )
        differences = differing_keys(_collect_rows(old, old_rows), _collect_rows(new, new_rows))
        if len(differences.source):
            keys = _find_keys([(old, old_rows), (new, new_rows)], set(differences.key.tolist()))
            yield from _with_keys(differences, keys)


def split_into_rounds(
    pairs: Sequence[tuple[JobPiece, JobPiece]],
) -> Iterator[list[tuple[JobPiece, JobPiece]]]:
    """Yield the pieces to compare together: at most ROUND_ROWS rows, or a single piece."""
    round_pairs: list[tuple[JobPiece, JobPiece]] = []
    rows = 0
    for pair in pairs:
        size = max(*(each.rows for each in pair), pair[0].end - pair[0].start)
        if round_pairs and rows + size > ROUND_ROWS:
            yield round_pairs
            round_pairs, rows = [], 0
        round_pairs.append(pair)
        rows += size
    if round_pairs:
        yield round_pairs


def _collect_rows(side: _Side, pieces: Sequence[JobPiece]) -> ComparedRows:
    parts = (select_pieces(rows, pieces) for _, rows in side.rows(pieces))
    return ComparedRows.concatenate([part for part in parts if len(part)])


def _find_keys(
    sides: Sequence[tuple[_Side, Sequence[JobPiece]]], hashes: set[int]
) -> dict[int, bytes]:
    """Return the keys that have these hashes. Rows are read again until every key is found."""
    keys_by_hash: dict[int, bytes] = {}
    for side, pieces in sides:
        for batch, rows in side.rows(pieces):
            missing_hashes = np.array(sorted(hashes - keys_by_hash.keys()), np.uint64)
            if not len(missing_hashes):
                return keys_by_hash
            indexes = np.flatnonzero(np.isin(rows.key, missing_hashes))
            row_hashes, firsts = np.unique(rows.key[indexes], return_index=True)
            keys = batch.column("key") if "key" in batch.schema.names else None
            for key_hash, row in zip(row_hashes.tolist(), indexes[firsts].tolist(), strict=True):
                key = None if keys is None else keys[row].as_py()
                keys_by_hash[key_hash] = key.encode() if isinstance(key, str) else key or b""
    return keys_by_hash


def _with_keys(differences: RowDifferences, keys: dict[int, bytes]) -> Iterator[KeyDifference]:
    """Yield the differences with the keys themselves instead of their hashes."""
    for source, key, first, rows in zip(
        differences.source.tolist(),
        differences.key.tolist(),
        differences.first_offset.tolist(),
        differences.rows.tolist(),
        strict=True,
    ):
        yield KeyDifference(partition_id=source, key=keys[key], first_offset=first, rows=rows)
