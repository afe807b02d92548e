"""Builds Arrow batches of about `batch_rows` rows from the stored batches of a range, and filters
rows by key. Pure.

Invariants
    Every batch is verified as a whole before any of its rows is used.
    The rows are exactly those of the range. A gap, an overlap or a batch of another partition
    raises CorruptBatchError.

Source: see arrow/columns.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import pyarrow as pa
import pyarrow.compute as pc

from ..protocol.batch import batch_starts, unpack_batch
from ..protocol.errors import CorruptBatchError, KeylaneError
from ..protocol.record import Header
from .columns import Piece, column, offsets, same_number, same_text, slice_piece
from .json_decoder import JsonDecoder
from .planner import PlannedRange
from .schema import arrow_schema

BATCH_BYTES_MAX = 8 << 20
"""The size in bytes at which an Arrow batch is complete. Workers have little memory, and the
offsets in an Arrow column have only 31 bits.
"""


class RowBuilder:
    """Builds the Arrow batches of a range from a partition's batches, which must be added in offset
    order.
    """

    def __init__(
        self,
        planned_range: PlannedRange,
        *,
        columns: tuple[str, ...],
        batch_rows: int,
        value_decoder: JsonDecoder | None = None,
    ) -> None:
        self._planned_range = planned_range
        self._value_decoder = value_decoder
        self._partition_id = planned_range.partition_id
        self._schema = arrow_schema(columns, None if value_decoder is None else value_decoder.type)
        self._batch_rows = batch_rows
        self._end = planned_range.end
        self._pieces: list[Piece] = []
        self._row_count = 0
        self._byte_count = 0
        self._first_offset = planned_range.start
        self.next_offset = planned_range.start
        """The offset after the last row added."""

    def add(self, payload: memoryview) -> Iterator[pa.RecordBatch]:
        """
        Add the batches in a broker's payload, and yield the Arrow batches that are complete.

        Raises:
            CorruptBatchError: a batch is damaged, belongs to another partition, or does not contain
                the next offset.
            CodecError: a value does not fit the JSON schema.
        """
        for start, header in batch_starts(payload):
            if self.next_offset >= self._end:
                break
            self._add_batch(memoryview(unpack_batch(payload, header, start)), header)
            if self._row_count >= self._batch_rows or self._byte_count >= BATCH_BYTES_MAX:
                yield from self.flush()

    def flush(self) -> Iterator[pa.RecordBatch]:
        """Yield the remaining rows as one batch, if there are any."""
        if self._row_count:
            yield self._build()
            self._pieces.clear()
            self._row_count = self._byte_count = 0
            self._first_offset = self.next_offset

    def _add_batch(self, record: memoryview, header: Header) -> None:
        offset = self.next_offset
        if header.partition_id != self._partition_id:
            raise CorruptBatchError(
                f"a batch of partition {header.partition_id} was sent for {self._partition_id}",
                partition_id=self._partition_id,
                found=header.partition_id,
            )
        if not header.base_offset <= offset < header.next_offset:
            raise CorruptBatchError(
                f"offset {offset} is missing in partition {self._partition_id}: "
                f"the broker sent a batch of [{header.base_offset}, {header.next_offset})",
                partition_id=self._partition_id,
                offset=offset,
                found=header.base_offset,
            )
        first = offset - header.base_offset
        last = min(header.count, self._end - header.base_offset)
        piece = slice_piece(record, header, first, last)
        self._pieces.append(piece)
        self._row_count += last - first
        self._byte_count += piece.size_bytes
        self.next_offset = header.base_offset + last

    def _build(self) -> pa.RecordBatch:
        return pa.RecordBatch.from_arrays(
            [self._column(name) for name in self._schema.names], schema=self._schema
        )

    def _column(self, name: str) -> pa.Array:
        planned_range, rows = self._planned_range, self._row_count
        match name:
            case "subject":
                return same_text(planned_range.subject, rows)
            case "partition":
                return same_number(planned_range.partition_id, rows)
            case "queue":
                return same_number(planned_range.queue, rows)
            case "epoch":
                return same_number(planned_range.epoch, rows)
            case "logic_offset":
                return offsets(planned_range.logic_start + self._first_offset, rows)
            case "value" if self._value_decoder is not None:
                values = column(name, self._pieces, self._first_offset)
                return self._value_decoder.decode(values, self._partition_id, self._first_offset)
            case _:
                return column(name, self._pieces, self._first_offset)


def coalesce(batches: Iterable[pa.RecordBatch], batch_rows: int) -> Iterator[pa.RecordBatch]:
    """
    Combine small batches until they have `batch_rows` rows, and yield all rows in order.

    In Spark's JVM, a batch costs as much as several thousand rows. If the source raises an error,
    all earlier rows are yielded first.
    """
    pending: list[pa.RecordBatch] = []
    rows = size = 0
    source = iter(batches)
    while True:
        source_error: KeylaneError | None = None
        try:
            batch = next(source, None)
        except KeylaneError as error:
            batch, source_error = None, error
        is_over_limit = batch is not None and (
            rows + batch.num_rows > batch_rows or size + batch.nbytes > BATCH_BYTES_MAX
        )
        if pending and (batch is None or is_over_limit):
            yield _combine(pending)
            pending, rows, size = [], 0, 0
        if source_error is not None:
            raise source_error
        if batch is None:
            return
        pending.append(batch)
        rows += batch.num_rows
        size += batch.nbytes
        if rows >= batch_rows:  # before the next batch, for which the reader might have to wait
            yield _combine(pending)
            pending, rows, size = [], 0, 0


def _combine(batches: list[pa.RecordBatch]) -> pa.RecordBatch:
    if len(batches) == 1:
        return batches[0]
    (combined,) = pa.Table.from_batches(batches).combine_chunks().to_batches()
    return combined


class KeyFilter:
    """Selects the requested columns of the rows that have one of the given order keys."""

    def __init__(self, keys: Iterable[bytes], columns: Sequence[str]) -> None:
        self._keys = pa.array(sorted(keys), pa.binary())
        self._columns = list(columns)
        self.columns_to_read = tuple(dict.fromkeys((*columns, "key")))
        """The columns that must be read: the requested columns and the key."""

    def rows(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Return the rows of a batch that have one of the keys, in their original order."""
        mask = pc.is_in(batch.column("key"), value_set=self._keys)
        return batch.filter(mask).select(self._columns)
