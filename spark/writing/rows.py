"""Checks and hashes the rows of a task, and cuts them into the same batches in each attempt,
without a Python object per row.

    record batch ─▶ columns of rows: keys, values, properties, times, logical partitions
                 ─sort─▶ spans of lanes ─cut─▶ bodies of batches

The bytes of a row are copied twice: once when rows are sorted by lane, and once into the body of
the batch.

Invariants
    Where batches are cut only depends on the rows, not on the record batches in which Spark passes
    them, so a repeated task sends the same batches.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any, NamedTuple, TypeAlias

import crc32c
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import xxhash

from ...arrow.column_hash import hash_column
from ...producer.tables.arrow import Column
from ...protocol.batch import BYTES_PER_MESSAGE, join_columns
from ...protocol.errors import InvalidRequestError, KeylaneError, Reason, RowsError
from ...protocol.ids import MAX_I64
from ...protocol.limits import KEY_BYTES_MAX, LOGICAL_PARTITIONS
from ...protocol.message import check_not_reserved, pack_properties
from .packed_properties import pack_maps

BATCH_ROWS = 8_192
BATCH_BYTES = 256 << 10
MICROS_MAX = MAX_I64 // 1_000
"""The latest time of a message, in microseconds since 1970; its negative is the earliest."""
KEYLESS_RUN = 4_096
"""The number of consecutive rows without a key that go to the same logical partition."""
ALL_LOGICAL_PARTITIONS = (0, LOGICAL_PARTITIONS)
I64: TypeAlias = npt.NDArray[np.int64]
U16: TypeAlias = npt.NDArray[np.uint16]


class RowColumns:
    """Some rows, stored as columns. An optional column is None if the rows do not have it."""

    def __init__(
        self,
        keys: Column | None,
        values: Column,
        properties: Column | None,
        times: I64 | None,
        logical_partitions: U16,
    ) -> None:
        self.keys = keys
        self.values = values
        self.properties = properties
        self.times = times
        self.logical_partitions = logical_partitions

    def __len__(self) -> int:
        return len(self.logical_partitions)

    @property
    def keyed(self) -> npt.NDArray[np.bool_]:
        """A mask that is True for each row with a key."""
        if self.keys is None:
            return np.zeros(len(self), np.bool_)
        keyed: npt.NDArray[np.bool_] = self.keys.lengths > 0
        return keyed

    @cached_property
    def sizes(self) -> I64:
        """The total size in bytes of the rows before each row, and finally of all rows."""
        sizes: I64 = BYTES_PER_MESSAGE * np.arange(len(self) + 1)
        for column in (self.keys, self.values, self.properties):
            if column is not None:
                sizes += column.edges
        return sizes

    def take(self, rows: npt.NDArray[np.intp]) -> RowColumns:
        """Return the rows at these indexes, in this order."""
        return RowColumns(
            None if self.keys is None else self.keys.take(rows),
            self.values.take(rows),
            None if self.properties is None else self.properties.take(rows),
            None if self.times is None else self.times[rows],
            self.logical_partitions[rows],
        )


class Span(NamedTuple):
    """The rows [start, end) of a RowColumns."""

    rows: RowColumns
    start: int
    end: int

    def split_by_bounds(self, bounds: Sequence[tuple[int, int]]) -> Iterator[tuple[int, Span]]:
        """
        For each range of logical partitions that has rows, yield its index and its rows.

        Args:
            bounds: non-overlapping ranges [start, end).
        """
        range_by_partition = np.full(LOGICAL_PARTITIONS, len(bounds), np.uint16)
        for number, (start, end) in enumerate(bounds):
            range_by_partition[start:end] = number
        range_numbers = range_by_partition[self.rows.logical_partitions[self.start : self.end]]
        if len(range_numbers) and (range_numbers == range_numbers[0]).all():
            if range_numbers[0] < len(bounds):
                yield int(range_numbers[0]), self
            return
        order = np.argsort(range_numbers, kind="stable")
        sorted_rows = self.rows.take(order + self.start if self.start else order)
        counts = np.bincount(range_numbers, minlength=len(bounds) + 1)
        edges = [0, *np.cumsum(counts).tolist()]
        for number in np.flatnonzero(counts[:-1]).tolist():
            yield number, Span(sorted_rows, edges[number], edges[number + 1])


class Body:
    """The body of a batch, and the values for its header."""

    __slots__ = ("count", "data", "digest", "first_ns", "last_ns", "spans")

    def __init__(self, spans: Sequence[Span], *, sent_at_ns: int, previous_digest: int) -> None:
        """
        Encode the rows of the spans.

        Args:
            spans: the rows, one span after another.
            sent_at_ns: the time for rows without one, in nanoseconds since 1970.
            previous_digest: the digest of all earlier rows in the lane.
        """
        self.spans = spans
        count = self.count = sum(end - start for _, start, end in spans)
        if spans[0].rows.times is None:
            times = sent_at_ns.to_bytes(8, "little", signed=True) * count
        else:
            times = b"".join(_time_bytes(each) for each in spans)
        self.first_ns = struct.unpack("<q", times[:8])[0]
        self.last_ns = struct.unpack("<q", times[-8:])[0]
        key_lengths, keys = _lengths_and_data([(each.rows.keys, each) for each in spans])
        value_lengths, values = _lengths_and_data([(each.rows.values, each) for each in spans])
        property_lengths, properties = _lengths_and_data(
            [(each.rows.properties, each) for each in spans]
        )
        self.data = join_columns(
            times,
            key_lengths,
            value_lengths,
            keys,
            values,
            count=count,
            property_lengths=property_lengths,
            properties=properties,
        )
        self.digest = crc32c.crc32c(memoryview(self.data)[8 * count :], previous_digest)
        """The digest of all rows in the lane so far, without their times, which a repeated batch of
        a stream does not reproduce.
        """


def _time_bytes(span: Span) -> bytes:
    assert span.rows.times is not None
    return span.rows.times[span.start : span.end].astype("<i8").tobytes()


def _lengths_and_data(
    parts: Sequence[tuple[Column | None, Span]],
) -> tuple[bytes, list[memoryview]]:
    """Return the encoded lengths, and the bytes of each span."""
    lengths: list[bytes] = []
    blobs: list[memoryview] = []
    for column, (_, start, end) in parts:
        if column is None:
            lengths.append(bytes(4 * (end - start)))
        else:
            lengths.append(column.lengths[start:end].astype("<u4").tobytes())
            blobs.append(column.get_bytes(start, end))
    return b"".join(lengths), blobs


class BatchCutter:
    """Cuts the rows of a lane into batches of at most BATCH_ROWS rows and BATCH_BYTES bytes. A
    larger row gets its own batch.
    """

    def __init__(self) -> None:
        self._open_spans: list[Span] = []
        self._count = self._size = 0

    def add(self, span: Span) -> Iterator[list[Span]]:
        """Add the next rows, and yield the complete batches."""
        rows, start, end = span
        sizes = rows.sizes
        while start < end:
            remaining_bytes = BATCH_BYTES - self._size
            fits = int(np.searchsorted(sizes, sizes[start] + remaining_bytes, "right")) - 1
            cut = min(fits, start + BATCH_ROWS - self._count, end)
            if not self._count:
                cut = max(cut, start + 1)
            if cut > start:
                self._open_spans.append(Span(rows, start, cut))
                self._count += cut - start
                self._size += int(sizes[cut] - sizes[start])
            if cut < end or self._count == BATCH_ROWS:
                yield self.pop_rest()
            start = max(start, cut)

    def pop_rest(self) -> list[Span]:
        """Remove and return the rows of the incomplete batch."""
        rest_spans, self._open_spans = self._open_spans, []
        self._count = self._size = 0
        return rest_spans


class RowReader:
    """
    Turns the record batches of a task into rows.

    Args:
        salt: identifies the task and its job, so that rows without a key go to the same partitions
            in each attempt.
        message_bytes_max: the maximum size of a message in the subject, in bytes.
        task: the number of the task, for error messages.
        allow_reserved: allow properties whose names are reserved for keylane.
        keyless_bounds: the logical partitions `[start, end)` that rows without a key go to.
    """

    def __init__(
        self,
        *,
        salt: bytes,
        message_bytes_max: int,
        task: int,
        allow_reserved: bool = False,
        keyless_bounds: tuple[int, int] = ALL_LOGICAL_PARTITIONS,
    ) -> None:
        self._salt = salt
        self._keyless_bounds = keyless_bounds
        self._message_bytes_max = message_bytes_max
        self._task = task
        self._allow_reserved = allow_reserved
        self.row = 0
        """The number of the next row."""

    def read(self, batch: pa.RecordBatch) -> RowColumns:
        """
        Return the rows of a record batch.

        Raises:
            RowsError: a value is null or too large, a key is an empty text, a property is not a
                string, or a time does not fit into 64-bit nanoseconds.
        """
        columns = dict(zip(batch.schema.names, batch.columns, strict=True))
        values = Column(columns["value"])
        if values.nulls is not None:
            raise self._row_error("value", int(values.nulls[0]), "a value must not be null")
        keys = Column(columns["key"]) if "key" in columns else None
        packed_properties = (
            self._pack_properties(columns["properties"]) if "properties" in columns else None
        )
        times = self._times_ns(columns["timestamp"]) if "timestamp" in columns else None
        self._check_sizes(values, keys, packed_properties)
        rows = RowColumns(
            keys, values, packed_properties, times, self._logical_partitions(keys, batch.num_rows)
        )
        self.row += len(rows)
        return rows

    def _logical_partitions(self, keys: Column | None, count: int) -> U16:
        if keys is None:
            return self._keyless_partitions(count)
        logical_partitions: U16 = (
            hash_column(keys.blob, keys.edges) % np.uint64(LOGICAL_PARTITIONS)
        ).astype(np.uint16)
        keyless = keys.lengths == 0
        return (
            np.where(keyless, self._keyless_partitions(count), logical_partitions)
            if keyless.any()
            else logical_partitions
        )

    def _keyless_partitions(self, count: int) -> U16:
        """Return the logical partitions that the next rows get if they have no key."""
        first, last = self.row // KEYLESS_RUN, (self.row + count) // KEYLESS_RUN
        start, end = self._keyless_bounds
        partition_of_run = [
            start + xxhash.xxh3_64_intdigest(self._salt + run.to_bytes(8, "little")) % (end - start)
            for run in range(first, last + 1)
        ]
        runs = np.arange(self.row, self.row + count) // KEYLESS_RUN - first
        logical_partitions: U16 = np.array(partition_of_run, np.uint16)[runs]
        return logical_partitions

    def _pack_properties(self, properties: Any) -> Column:
        packed_column = (
            pack_maps(properties)
            if self._allow_reserved or _has_no_reserved_name(properties)
            else None
        )
        if packed_column is not None:
            return Column(packed_column)
        packed: list[bytes] = []  # row by row, to find the invalid one
        for index, entries in enumerate(properties.to_pylist()):
            given = dict(entries or ())
            try:
                packed.append(pack_properties(given, kept=given if self._allow_reserved else ()))
            except KeylaneError as error:
                raise self._row_error("properties", index, error.message) from error
        return Column(pa.array(packed, pa.large_binary()))

    def _times_ns(self, column: Any) -> I64:
        if column.null_count:
            raise self._row_error(
                "timestamp", int(np.flatnonzero(_null_mask(column))[0]), "a time must not be null"
            )
        times_us: I64 = pc.cast(column, pa.int64()).to_numpy(zero_copy_only=False)
        is_out_of_range = (times_us > MICROS_MAX) | (times_us < -MICROS_MAX)
        if is_out_of_range.any():  # the nanoseconds would overflow
            raise self._row_error(
                "timestamp",
                int(np.argmax(is_out_of_range)),
                "a message has a time from 1677-09-22 to 2262-04-11, in nanoseconds of 64 bits",
            )
        return times_us * 1_000

    def _check_sizes(self, values: Column, keys: Column | None, packed: Column | None) -> None:
        sizes = values.lengths
        if keys is not None:
            key_bytes = keys.lengths
            if len(keys.empty_texts):
                row = int(keys.empty_texts[0])
                raise self._row_error("key", row, "an empty text: null means no key")
            if int(key_bytes.max(initial=0)) > KEY_BYTES_MAX:
                row = int(np.argmax(key_bytes > KEY_BYTES_MAX))
                raise self._row_error("key", row, f"{key_bytes[row]} bytes, over {KEY_BYTES_MAX}")
            sizes = sizes + key_bytes
        if packed is not None:
            sizes = sizes + packed.lengths
        if int(sizes.max(initial=0)) > self._message_bytes_max:
            row = int(np.argmax(sizes > self._message_bytes_max))
            raise self._row_error(
                "value",
                row,
                f"key, value and properties have {sizes[row]} bytes, over "
                f"{self._message_bytes_max}",
            )

    def _row_error(self, column: str, index: int, reason: str) -> RowsError:
        return RowsError(
            Reason.ROWS_INVALID,
            f"row {self.row + index} of task {self._task}, column {column}: {reason}",
            column=column,
            row=self.row + index,
            task=self._task,
        )


def _has_no_reserved_name(properties: Any) -> bool:
    """Return True if no property name is reserved for keylane. For a slice, this also checks the
    rows outside the slice.
    """
    try:
        check_not_reserved(pc.unique(properties.keys).to_pylist())
    except InvalidRequestError:
        return False
    return True


def _null_mask(array: Any) -> Any:
    return array.is_null().to_numpy(zero_copy_only=False)
