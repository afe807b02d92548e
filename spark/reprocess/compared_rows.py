"""Rows of two outputs matched by what they were made of, as columns of numbers: no Python object a
row.

    batch ─▶ source partition, source offset, hashes of key and row ─sort─▶ the same place and key
        on both sides: equal or not

Rows of one message and key are matched by their order, those without a key by their hashes: their
order is that of the partitions they happen to lie in.  What a job adds to each row (`replay`,
`keylane.source`, the time of its plan) is no difference.

Invariants
    A row counts as equal if key, value, properties and time are; two rows that differ have one
    64-bit hash by chance alone.
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
from ...protocol.reprocess.manifest import JobPiece
from ...protocol.reprocess.sources import SOURCE
from .carrying import sources_of
from .messages import PROPERTIES, REPLAY

I64 = npt.NDArray[np.int64]
U64 = npt.NDArray[np.uint64]
NO_TIME = np.iinfo(np.int64).min
"""Of a row that has the time of its job's plan, because the function gave none: equal to any."""
_KEYLESS = xxhash.xxh3_64_intdigest(b"")
_ODD = np.uint64(0x9E3779B185EBCA87)


@dataclass(frozen=True, slots=True)
class ComparedRows:
    """Some rows of one side, in the order in which they are stored."""

    source: I64
    """The partition of what each was made of."""
    offset: I64
    """The offset of what each was made of."""
    key: U64
    """Hash of the key."""
    row: U64
    """Hash of key, value and properties."""
    time_us: I64

    def __len__(self) -> int:
        return len(self.source)

    def take(self, chosen: npt.NDArray[Any]) -> ComparedRows:
        """Some of the rows."""
        return ComparedRows(*(getattr(self, each.name)[chosen] for each in fields(self)))

    @classmethod
    def together(cls, parts: Sequence[ComparedRows]) -> ComparedRows:
        """The rows of all parts, one after another."""
        if not parts:
            empty = np.zeros(0, np.int64)
            return cls(empty, empty, empty.astype(np.uint64), empty.astype(np.uint64), empty)
        return cls(
            *(np.concatenate([getattr(part, each.name) for part in parts]) for each in fields(cls))
        )


@dataclass(frozen=True, slots=True)
class Unlike:
    """The keys of each source partition whose rows differ."""

    source: I64
    key: U64
    first_offset: I64
    rows: I64
    """How many rows are not the same, or are on one side only."""


def compared_rows(
    batch: pa.RecordBatch, *, own_places: bool, planned_us: int | None, where: str
) -> ComparedRows:
    """
    The rows of a record batch with the columns value and, where there are any, key, properties and
    timestamp.

    Args:
        own_places: the rows are the messages themselves, with the columns partition and offset;
            False: their properties say what they were made of.
        planned_us: the time of rows whose function gave none.
        where: the output, for errors.

    Raises:
        JobError: a row does not say what it was made of.
    """
    columns = dict(zip(batch.schema.names, batch.columns, strict=True))
    count = batch.num_rows
    maps = columns.get("properties")
    maps = pa.nulls(count, PROPERTIES) if maps is None else maps.cast(PROPERTIES)
    if own_places:
        source, offset = (
            columns[name].to_numpy(zero_copy_only=False).astype(np.int64)
            for name in ("partition", "offset")
        )
    else:
        try:
            source, offset = sources_of(maps)
        except JobError as error:
            raise JobError(Reason.OUTPUTS_DIFFER, f"{where}: {error.message}", path=where) from None
    keys = _hashes(columns.get("key"), count)
    row = _mixed(_mixed(keys, _hashes(columns["value"], count)), _of_properties(maps))
    return ComparedRows(
        source, offset, keys, row, _times(columns.get("timestamp"), count, planned_us)
    )


def of_pieces(rows: ComparedRows, pieces: Iterable[JobPiece]) -> ComparedRows:
    """The rows that were made of messages of these pieces."""
    by_partition: dict[int, list[tuple[int, int]]] = {}
    for piece in pieces:
        by_partition.setdefault(piece.partition_id, []).append((piece.start, piece.end))
    chosen = np.zeros(len(rows), bool)
    for partition_id, bounds in by_partition.items():
        starts, ends = np.array(sorted(bounds), np.int64).T
        at = np.searchsorted(starts, rows.offset, "right") - 1
        chosen |= (rows.source == partition_id) & (at >= 0) & (rows.offset < ends[at])
    return rows if chosen.all() else rows.take(chosen)


def unlike_keys(old: ComparedRows, new: ComparedRows) -> Unlike:
    """The keys whose rows differ, by source partition and first offset."""
    rows = ComparedRows.together([old, new])
    side = np.repeat(np.array([0, 1], np.int8), [len(old), len(new)])
    order = np.where(rows.key == np.uint64(_KEYLESS), rows.row, np.uint64(0))
    # A stable sort: what is equal stays in the order in which it is stored.
    in_order = np.lexsort((order, side, rows.key, rows.offset, rows.source))
    rows, side = rows.take(in_order), side[in_order]
    rank = _ranks(rows, side)
    paired = np.lexsort((side, rank, rows.key, rows.offset, rows.source))
    rows, side, rank = rows.take(paired), side[paired], rank[paired]
    same_place = _same_place(rows) & (rank[1:] == rank[:-1])
    unlike = np.ones(len(rows), bool)
    at = np.flatnonzero(same_place)
    times = rows.time_us[at], rows.time_us[at + 1]
    equal = (rows.row[at] == rows.row[at + 1]) & (
        (times[0] == times[1]) | (times[0] == NO_TIME) | (times[1] == NO_TIME)
    )
    unlike[at] = ~equal
    unlike[at + 1] = False  # counted once
    return _by_key(rows.take(unlike))


def _by_key(rows: ComparedRows) -> Unlike:
    order = np.lexsort((rows.offset, rows.key, rows.source))
    rows = rows.take(order)
    if not len(rows):
        return Unlike(rows.source, rows.key, rows.offset, rows.offset)
    firsts = np.concatenate([[True], (np.diff(rows.source) != 0) | (rows.key[1:] != rows.key[:-1])])
    starts = np.flatnonzero(firsts)
    counts = np.diff(np.append(starts, len(rows))).astype(np.int64)
    matches = rows.take(starts)
    by_offset = np.lexsort((matches.offset, matches.source))
    matches = matches.take(by_offset)
    return Unlike(matches.source, matches.key, matches.offset, counts[by_offset])


def _same_place(rows: ComparedRows) -> npt.NDArray[np.bool_]:
    """Whether each row but the first has the place and the key of the one before it."""
    same: npt.NDArray[np.bool_] = (
        (np.diff(rows.source) == 0) & (np.diff(rows.offset) == 0) & (rows.key[1:] == rows.key[:-1])
    )
    return same


def _ranks(rows: ComparedRows, side: npt.NDArray[np.int8]) -> I64:
    """The number of each row among those of its side, place and key."""
    count = len(rows)
    if not count:
        return np.zeros(0, np.int64)
    begins = np.concatenate([[True], ~(_same_place(rows) & (np.diff(side) == 0))])
    numbers = np.arange(count)
    ranks: I64 = numbers - np.maximum.accumulate(np.where(begins, numbers, 0))
    return ranks


def _hashes(column: Any, count: int) -> U64:
    if column is None:
        return np.full(count, _KEYLESS, np.uint64)
    bytes_of = Column(column)
    return hash_column(bytes_of.blob, bytes_of.edges)


def _mixed(left: U64, right: U64) -> U64:
    mixed = (left ^ (right >> np.uint64(29))) * _ODD + right
    return mixed ^ (mixed >> np.uint64(32))


def _of_properties(maps: Any) -> U64:
    """A hash of the properties of each row, whatever their order, without those that a job adds."""
    flat = maps.cast(pa.list_(_ENTRY))
    lengths = pc.list_value_length(flat).fill_null(0).to_numpy(zero_copy_only=False)
    entries = flat.flatten()
    keys, values = entries.field(0), entries.field(1)
    hashes = _mixed(_hashes(keys, len(keys)), _hashes(values, len(keys)))
    added = pc.is_in(keys, pa.array([REPLAY, SOURCE], pa.string()))
    hashes[added.to_numpy(zero_copy_only=False).astype(bool)] = 0
    totals = np.concatenate([np.zeros(1, np.uint64), np.cumsum(hashes, dtype=np.uint64)])
    ends = np.cumsum(lengths).astype(np.int64)
    hashed: U64 = totals[ends] - totals[ends - lengths.astype(np.int64)]
    return hashed


def _times(column: Any, count: int, planned_us: int | None) -> I64:
    if column is None:
        return np.full(count, NO_TIME, np.int64)
    micros = pc.cast(pc.cast(column, pa.timestamp("us", "UTC"), safe=False), pa.int64())
    times: I64 = micros.fill_null(NO_TIME).to_numpy(zero_copy_only=False)
    return times if planned_us is None else np.where(times == planned_us, NO_TIME, times)


_ENTRY = pa.struct([pa.field("key", pa.string(), nullable=False), pa.field("value", pa.string())])
