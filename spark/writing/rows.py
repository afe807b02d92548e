"""Rows of a task as columns of bytes: checked, hashed, cut into batches that are the same each time.  No Python object a row.

    record batch ─▶ rows: keys, values, properties, times, logical partitions ─take─▶ rows of a lane ─cut─▶ bodies of batches

Invariants
    Where batches are cut depends on the rows alone, not on the record batches in which Spark gives them: a repeated task
    gives the same batches.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any, TypeAlias

import crc32c
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import xxhash

from ...arrow.column_hash import hash_column
from ...producer.tables.arrow import Column
from ...protocol.batch import BYTES_PER_MESSAGE, join_columns
from ...protocol.errors import KeylaneError, RowsInvalidError
from ...protocol.limits import KEY_BYTES_MAX, LOGICAL_PARTITIONS
from ...protocol.message import pack_properties

BATCH_ROWS = 8_192
BATCH_BYTES = 256 << 10
KEYLESS_RUN = 4_096
"""Rows of a task in a row that go to one logical partition if they have no key."""
I64: TypeAlias = npt.NDArray[np.int64]
U16: TypeAlias = npt.NDArray[np.uint16]


class RowColumns:
    """Some rows, in order.  Arrays are of the type large_binary; None: no row has a key, properties, a time."""

    __slots__ = ("keys", "logical", "properties", "times", "values")

    def __init__(
        self, keys: Any, values: Any, properties: Any, times: I64 | None, logical: U16
    ) -> None:
        self.keys, self.values, self.properties = keys, values, properties
        self.times = times
        self.logical = logical

    def __len__(self) -> int:
        return len(self.logical)

    def take(self, rows: npt.NDArray[np.intp]) -> RowColumns:
        """These rows, in their order."""
        # `pa.array(rows)` would import pandas where it is installed.
        indices = pa.Array.from_buffers(
            pa.int64(), len(rows), [None, pa.py_buffer(rows.astype(np.int64))]
        )
        return RowColumns(
            None if self.keys is None else self.keys.take(indices),
            self.values.take(indices),
            None if self.properties is None else self.properties.take(indices),
            None if self.times is None else self.times[rows],
            self.logical[rows],
        )

    def part(self, start: int, end: int) -> RowColumns:
        """The rows [start, end)."""
        return RowColumns(
            None if self.keys is None else self.keys[start:end],
            self.values[start:end],
            None if self.properties is None else self.properties[start:end],
            None if self.times is None else self.times[start:end],
            self.logical[start:end],
        )

    def followed_by(self, other: RowColumns) -> RowColumns:
        """These rows and then the other ones, which have the same columns."""
        if not len(self):
            return other

        def joined(first: Any, second: Any) -> Any:
            return None if first is None else pa.concat_arrays([first, second])

        return RowColumns(
            joined(self.keys, other.keys),
            joined(self.values, other.values),
            joined(self.properties, other.properties),
            None
            if self.times is None or other.times is None
            else np.concatenate([self.times, other.times]),
            np.concatenate([self.logical, other.logical]),
        )

    def cut(self, *, last: bool) -> Iterator[tuple[int, int]]:
        """The batches [start, end); without `last`, a batch that may get more rows is left out."""
        columns = [Column(self.values)]
        columns += [Column(each) for each in (self.keys, self.properties) if each is not None]
        sizes = BYTES_PER_MESSAGE * np.arange(len(self) + 1)
        for column in columns:
            sizes = sizes + column.edges - column.edges[0]
        start, count = 0, len(self)
        while start < count:
            fits = int(np.searchsorted(sizes, sizes[start] + BATCH_BYTES, "right")) - 1
            end = max(start + 1, min(fits, start + BATCH_ROWS, count))
            if end == count and not last and end - start < BATCH_ROWS:
                return
            yield start, end
            start = end


class Body:
    """The body of a batch, and what its header says of it."""

    __slots__ = ("count", "data", "digest", "first_ns", "last_ns")

    def __init__(
        self, rows: RowColumns, start: int, end: int, *, sent_at_ns: int, before: int
    ) -> None:
        """
        Of the rows [start, end).

        Args:
            sent_at_ns: the time of rows that have none.
            before: the digest of all rows of the lane before these.
        """
        count = self.count = end - start
        if rows.times is None:
            times = sent_at_ns.to_bytes(8, "little", signed=True) * count
        else:
            times = rows.times[start:end].astype("<i8").tobytes()
        self.first_ns, self.last_ns = (
            struct.unpack("<q", times[:8])[0],
            struct.unpack("<q", times[-8:])[0],
        )
        values = Column(rows.values[start:end])
        keys = None if rows.keys is None else Column(rows.keys[start:end])
        more = None if rows.properties is None else Column(rows.properties[start:end])
        self.data = join_columns(
            times,
            bytes(4 * count) if keys is None else keys.lengths.astype("<u4").tobytes(),
            values.lengths.astype("<u4").tobytes(),
            b"" if keys is None else keys.bytes_of(0, count),
            values.bytes_of(0, count),
            count=count,
            property_lengths=None if more is None else more.lengths.astype("<u4").tobytes(),
            properties=b"" if more is None else more.bytes_of(0, count),
        )
        self.digest = crc32c.crc32c(memoryview(self.data)[8 * count :], before)
        """Of all rows of the lane up to here, without their times: a repeated stream does not know them again."""


class RowReader:
    """
    Makes rows of the record batches of a task.

    Args:
        salt: says which task of which job this is: its rows without a key go to the same partitions each time.
        message_bytes_max: the subject's limit.
        task: number of the task, for errors.
    """

    def __init__(self, *, salt: bytes, message_bytes_max: int, task: int) -> None:
        self._salt = salt
        self._limit = message_bytes_max
        self._task = task
        self.row = 0
        """The number of the next row."""

    def read(self, batch: pa.RecordBatch) -> RowColumns:
        """
        The rows of a record batch.

        Raises:
            RowsInvalidError: a value is null or too large, or a property is no text.
        """
        columns = dict(zip(batch.schema.names, batch.columns, strict=True))
        values = _binary(columns["value"])
        if values.null_count:
            raise self._wrong("value", int(np.flatnonzero(_nulls(values))[0]), "a null is no value")
        keys = _binary(columns["key"]).fill_null(b"") if "key" in columns else None
        packed = self._packed(columns["properties"]) if "properties" in columns else None
        times = self._times(columns["timestamp"]) if "timestamp" in columns else None
        self._check_sizes(values, keys, packed)
        rows = RowColumns(keys, values, packed, times, self._logical(keys, len(values)))
        self.row += len(rows)
        return rows

    def _logical(self, keys: Any, count: int) -> U16:
        runs = np.arange(self.row, self.row + count) // KEYLESS_RUN
        of_run = {
            int(run): xxhash.xxh3_64_intdigest(self._salt + int(run).to_bytes(8, "little"))
            % LOGICAL_PARTITIONS
            for run in (np.unique(runs) if count else ())
        }
        keyless = np.array([of_run[run] for run in of_run], np.uint16)
        logical: U16 = keyless[runs - runs[0]] if count else keyless
        if keys is None:
            return logical
        column = Column(keys)
        hashed = (hash_column(column.blob, column.edges) % np.uint64(LOGICAL_PARTITIONS)).astype(
            np.uint16
        )
        return np.where(column.lengths == 0, logical, hashed)

    def _packed(self, properties: Any) -> Any:
        packed: list[bytes] = []
        for index, entries in enumerate(properties.to_pylist()):
            try:
                packed.append(pack_properties(dict(entries)) if entries else b"")
            except KeylaneError as error:
                raise self._wrong("properties", index, error.message) from error
        return pa.array(packed, pa.large_binary())

    def _times(self, column: Any) -> I64:
        if column.null_count:
            raise self._wrong(
                "timestamp", int(np.flatnonzero(_nulls(column))[0]), "a null is no time"
            )
        micros: I64 = pc.cast(column, pa.int64()).to_numpy(zero_copy_only=False)
        return micros * 1_000

    def _check_sizes(self, values: Any, keys: Any, packed: Any) -> None:
        sizes = Column(values).lengths
        if keys is not None:
            key_bytes = Column(keys).lengths
            if int(key_bytes.max(initial=0)) > KEY_BYTES_MAX:
                row = int(np.argmax(key_bytes > KEY_BYTES_MAX))
                raise self._wrong("key", row, f"{key_bytes[row]} bytes, over {KEY_BYTES_MAX}")
            sizes = sizes + key_bytes
        if packed is not None:
            sizes = sizes + Column(packed).lengths
        if int(sizes.max(initial=0)) > self._limit:
            row = int(np.argmax(sizes > self._limit))
            raise self._wrong(
                "value",
                row,
                f"key, value and properties have {sizes[row]} bytes, over {self._limit}",
            )

    def _wrong(self, column: str, index: int, why: str) -> RowsInvalidError:
        return RowsInvalidError(
            f"row {self.row + index} of task {self._task}, column {column}: {why}",
            column=column,
            row=self.row + index,
            task=self._task,
        )


def _binary(array: Any) -> Any:
    return array.cast(pa.large_binary())


def _nulls(array: Any) -> Any:
    return array.is_null().to_numpy(zero_copy_only=False)
