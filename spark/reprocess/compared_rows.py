"""Compares the rows of two outputs, matched by the messages that they were made from.

    batch ─▶ source partition, source offset, hashes of key and row
          ─sort─▶ rows with the same source and key on both sides ─▶ equal or not

Rows are stored as columns of numbers, without a Python object per row. Rows that were made from the
same message and have the same key are matched by their order. Rows without a key are matched by
their hashes, because their order depends on the partitions in which they are stored. Anything that
a job adds to each row (`replay`, `keylane.source`, the time of the plan) does not count as a
difference.

Invariants
    Rows are equal if their key, value, properties and time are equal, except for collisions of
    64-bit hashes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import xxhash

from ...arrow.column_hash import hash_column
from ...producer.tables.arrow import Column
from ...protocol.errors import JobError, Reason
from ...protocol.reprocess.manifest import SOURCE, JobPiece
from .carrying import parse_sources
from .messages import PROPERTIES, REPLAY, flatten_entries

I64 = npt.NDArray[np.int64]
U64 = npt.NDArray[np.uint64]
NO_TIME = np.iinfo(np.int64).min
"""The time of a row that the function returned without a time, which then has the time of the job's
plan. It equals any time.
"""
_KEYLESS = xxhash.xxh3_64_intdigest(b"")
_MIX_MULTIPLIER = np.uint64(0x9E3779B185EBCA87)


@dataclass(frozen=True, slots=True)
class ComparedRows:
    """Rows of one output in stored order; each field is a column."""

    source: I64
    """The partition of the message that the row was made from."""
    offset: I64
    """The offset of the message that the row was made from."""
    key: U64
    """The hash of the key."""
    row: U64
    """The hash of the key, value and properties."""
    time_us: I64

    def __len__(self) -> int:
        return len(self.source)

    def take(self, selection: npt.NDArray[Any]) -> ComparedRows:
        """Return the rows that are selected by a mask or an array of indexes."""
        return ComparedRows(*(getattr(self, each.name)[selection] for each in fields(self)))

    @classmethod
    def concatenate(cls, parts: Sequence[ComparedRows]) -> ComparedRows:
        """Concatenate the rows of all parts."""
        if not parts:
            empty = np.zeros(0, np.int64)
            return cls(empty, empty, empty.astype(np.uint64), empty.astype(np.uint64), empty)
        return cls(
            *(np.concatenate([getattr(part, each.name) for part in parts]) for each in fields(cls))
        )


@dataclass(frozen=True, slots=True)
class RowDifferences:
    """The keys whose rows differ, by source partition; each field is a column."""

    source: I64
    key: U64
    first_offset: I64
    rows: I64
    """The number of rows that differ, or that exist in only one output."""


def compared_rows(
    batch: pa.RecordBatch, *, is_source: bool, planned_us: int | None, where: str
) -> ComparedRows:
    """
    Return the rows of a record batch, which must have the column value, and may have key,
    properties and timestamp.

    Args:
        is_source: True if the rows are source messages, with the columns partition and offset;
            False if their properties name the messages that they were made from.
        planned_us: the time of the job's plan, in microseconds since 1970.
        where: the name of the output, for error messages.

    Raises:
        JobError: a row does not name the message that it was made from.
    """
    columns = dict(zip(batch.schema.names, batch.columns, strict=True))
    count = batch.num_rows
    properties = columns.get("properties")
    properties = pa.nulls(count, PROPERTIES) if properties is None else properties.cast(PROPERTIES)
    if is_source:
        source, offset = (
            columns[name].to_numpy(zero_copy_only=False).astype(np.int64)
            for name in ("partition", "offset")
        )
    else:
        try:
            source, offset = parse_sources(properties)
        except JobError as error:
            raise JobError(Reason.OUTPUTS_DIFFER, f"{where}: {error.message}", path=where) from None
    keys = _hash_column(columns.get("key"), count)
    row = _mix(_mix(keys, _hash_column(columns["value"], count)), _hash_properties(properties))
    return ComparedRows(
        source, offset, keys, row, _times_us(columns.get("timestamp"), count, planned_us)
    )


def select_pieces(rows: ComparedRows, pieces: Iterable[JobPiece]) -> ComparedRows:
    """Return the rows that were made from messages of these pieces."""
    by_partition: dict[int, list[tuple[int, int]]] = {}
    for piece in pieces:
        by_partition.setdefault(piece.partition_id, []).append((piece.start, piece.end))
    is_selected = np.zeros(len(rows), bool)
    for partition_id, bounds in by_partition.items():
        starts, ends = np.array(sorted(bounds), np.int64).T
        indexes = np.searchsorted(starts, rows.offset, "right") - 1
        is_selected |= (
            (rows.source == partition_id) & (indexes >= 0) & (rows.offset < ends[indexes])
        )
    return rows if is_selected.all() else rows.take(is_selected)


def differing_keys(old: ComparedRows, new: ComparedRows) -> RowDifferences:
    """Return the keys whose rows differ, sorted by source partition and first offset."""
    rows = ComparedRows.concatenate([old, new])
    side = np.repeat(np.array([0, 1], np.int8), [len(old), len(new)])
    order = np.where(rows.key == np.uint64(_KEYLESS), rows.row, np.uint64(0))
    # The sort is stable, so that equal rows stay in stored order.
    in_order = np.lexsort((order, side, rows.key, rows.offset, rows.source))
    rows, side = rows.take(in_order), side[in_order]
    rank = _rank_rows(rows, side)
    paired = np.lexsort((side, rank, rows.key, rows.offset, rows.source))
    rows, side, rank = rows.take(paired), side[paired], rank[paired]
    is_pair = _continues_previous(rows) & (rank[1:] == rank[:-1])
    is_different = np.ones(len(rows), bool)
    indexes = np.flatnonzero(is_pair)
    times = rows.time_us[indexes], rows.time_us[indexes + 1]
    is_equal = (rows.row[indexes] == rows.row[indexes + 1]) & (
        (times[0] == times[1]) | (times[0] == NO_TIME) | (times[1] == NO_TIME)
    )
    is_different[indexes] = ~is_equal
    is_different[indexes + 1] = False  # counted once
    return _group_by_key(rows.take(is_different))


def _group_by_key(rows: ComparedRows) -> RowDifferences:
    order = np.lexsort((rows.offset, rows.key, rows.source))
    rows = rows.take(order)
    if not len(rows):
        return RowDifferences(rows.source, rows.key, rows.offset, rows.offset)
    is_first = np.concatenate(
        [[True], (np.diff(rows.source) != 0) | (rows.key[1:] != rows.key[:-1])]
    )
    starts = np.flatnonzero(is_first)
    counts = np.diff(np.append(starts, len(rows))).astype(np.int64)
    first_rows = rows.take(starts)
    by_offset = np.lexsort((first_rows.offset, first_rows.source))
    first_rows = first_rows.take(by_offset)
    return RowDifferences(first_rows.source, first_rows.key, first_rows.offset, counts[by_offset])


def _continues_previous(rows: ComparedRows) -> npt.NDArray[np.bool_]:
    """Return, for each row but the first, whether the previous row has the same source and key."""
    same: npt.NDArray[np.bool_] = (
        (np.diff(rows.source) == 0) & (np.diff(rows.offset) == 0) & (rows.key[1:] == rows.key[:-1])
    )
    return same


def _rank_rows(rows: ComparedRows, side: npt.NDArray[np.int8]) -> I64:
    """Return the index of each row among the rows with the same side, source and key."""
    count = len(rows)
    if not count:
        return np.zeros(0, np.int64)
    begins = np.concatenate([[True], ~(_continues_previous(rows) & (np.diff(side) == 0))])
    numbers = np.arange(count)
    ranks: I64 = numbers - np.maximum.accumulate(np.where(begins, numbers, 0))
    return ranks


def _hash_column(column: Any, count: int) -> U64:
    if column is None:
        return np.full(count, _KEYLESS, np.uint64)
    binary = Column(column)
    return hash_column(binary.blob, binary.edges)


def _mix(left: U64, right: U64) -> U64:
    mixed = (left ^ (right >> np.uint64(29))) * _MIX_MULTIPLIER + right
    return mixed ^ (mixed >> np.uint64(32))


def _hash_properties(properties: Any) -> U64:
    """Return a hash of each row's properties that ignores their order, and the properties that a
    job adds.
    """
    keys, values, offsets = flatten_entries(properties, len(properties))
    hashes = _mix(_hash_column(keys, len(keys)), _hash_column(values, len(keys)))
    added = pc.is_in(keys, pa.array([REPLAY, SOURCE], pa.string()))
    hashes[added.to_numpy(zero_copy_only=False).astype(bool)] = 0
    totals = np.concatenate([np.zeros(1, np.uint64), np.cumsum(hashes, dtype=np.uint64)])
    hashed: U64 = totals[offsets[1:]] - totals[offsets[:-1]]
    return hashed


def _times_us(column: Any, count: int, planned_us: int | None) -> I64:
    """Return the times of rows in µs; times equal to that of the job's plan count as missing."""
    if column is None:
        return np.full(count, NO_TIME, np.int64)
    micros = pc.cast(pc.cast(column, pa.timestamp("us", "UTC"), safe=False), pa.int64())
    times: I64 = micros.fill_null(NO_TIME).to_numpy(zero_copy_only=False)
    return times if planned_us is None else np.where(times == planned_us, NO_TIME, times)
