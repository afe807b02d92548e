"""Batch columns become Arrow columns: buffers are cut and joined, no Python runs per message.  Pure.

    record   times i64×n │ lengths u32×3n │ keys │ values │ properties        one batch of the broker
                 │             │              │       │
                 ▼             ▼ cumsum       ▼       ▼  joined over the batches of one Arrow batch
    Arrow    timestamp      edges i32      key    value                       about `batch_rows` rows

Invariants
    Every batch is checked as a whole before anything of it is used.
    The rows are exactly the range, dense: a hole, an overlap or another partition's batch is a
    CorruptBatchError, never a row less or more.

Source: the body of a batch is columnar for this reader; see protocol/batch.py.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from ..protocol.batch import BYTES_PER_MESSAGE, batch_starts, unpacked
from ..protocol.errors import CorruptBatchError
from ..protocol.message import unpack_properties
from ..protocol.record import HEADER_BYTES, Header
from .schema import arrow_schema

BATCH_BYTES_MAX = 8 << 20
"""An Arrow batch is cut here, whatever its rows: workers have little memory, and offsets in it 31 bits."""


@dataclass(frozen=True, slots=True)
class _Piece:
    """The rows of one batch that lie in the range: lengths as u32 arrays, blobs as views of the frame."""

    sent_at_ns: np.ndarray
    key_lengths: np.ndarray
    value_lengths: np.ndarray
    property_lengths: np.ndarray
    keys: memoryview
    values: memoryview
    properties: memoryview


class RowBuilder:
    """Takes the batches of one partition in order of offset, gives Arrow batches of the range `[start, end)`."""

    def __init__(
        self,
        *,
        subject: str,
        partition_id: int,
        start: int,
        end: int,
        columns: tuple[str, ...],
        batch_rows: int,
    ) -> None:
        self._subject = pa.scalar(subject, pa.string())
        self._partition = pa.scalar(partition_id, pa.int32())
        self._partition_id = partition_id
        self._schema = arrow_schema(columns)
        self._batch_rows = batch_rows
        self._end = end
        self._pieces: list[_Piece] = []
        self._rows = 0
        self._bytes = 0
        self._first = start
        self.next_offset = start
        """The first offset not yet taken."""

    def take(self, payload: memoryview) -> Iterator[pa.RecordBatch]:
        """
        Take whole batches of the broker, and return the Arrow batches that are full.

        Raises:
            CorruptBatchError: damaged, of another partition, or not the next offsets.
        """
        for start, header in batch_starts(payload):
            if self.next_offset >= self._end:
                break
            self._add(memoryview(unpacked(payload, header, start)), header)
            if self._rows >= self._batch_rows or self._bytes >= BATCH_BYTES_MAX:
                yield from self.rest()

    def rest(self) -> Iterator[pa.RecordBatch]:
        """Return the remaining rows: one batch, or none."""
        if self._rows:
            yield self._build()
            self._pieces.clear()
            self._rows = self._bytes = 0
            self._first = self.next_offset

    def _add(self, record: memoryview, header: Header) -> None:
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
                f"the batch sent holds [{header.base_offset}, {header.next_offset})",
                partition_id=self._partition_id,
                offset=offset,
                found=header.base_offset,
            )
        first = offset - header.base_offset
        last = min(header.count, self._end - header.base_offset)
        piece = _cut(record, header, first, last)
        self._pieces.append(piece)
        self._rows += last - first
        self._bytes += len(piece.keys) + len(piece.values) + len(piece.properties)
        self.next_offset = header.base_offset + last

    def _build(self) -> pa.RecordBatch:
        return pa.RecordBatch.from_arrays(
            [self._column(name) for name in self._schema.names], schema=self._schema
        )

    def _column(self, name: str) -> pa.Array:
        pieces = self._pieces
        match name:
            case "subject":
                return pa.repeat(self._subject, self._rows)
            case "partition":
                return pa.repeat(self._partition, self._rows)
            case "offset":
                return pa.array(np.arange(self._first, self.next_offset, dtype=np.int64))
            case "key":
                return _blobs(
                    [piece.key_lengths for piece in pieces], [piece.keys for piece in pieces]
                )
            case "value":
                return _blobs(
                    [piece.value_lengths for piece in pieces], [piece.values for piece in pieces]
                )
            case "timestamp":
                return _timestamps([piece.sent_at_ns for piece in pieces])
            case _:
                assert name == "properties"
                return _maps(
                    [piece.property_lengths for piece in pieces],
                    [piece.properties for piece in pieces],
                )


def _cut(record: memoryview, header: Header, first: int, last: int) -> _Piece:
    """Messages `[first, last)` of a batch, by their place in it."""
    count = header.count
    times = np.frombuffer(record, "<i8", count, HEADER_BYTES)
    lengths = np.frombuffer(record, "<u4", 3 * count, HEADER_BYTES + 8 * count)
    kinds = lengths.reshape(3, count)
    key_bytes, value_bytes, property_bytes = kinds.sum(axis=1, dtype=np.int64).tolist()
    keys_at = HEADER_BYTES + BYTES_PER_MESSAGE * count
    values_at = keys_at + key_bytes
    properties_at = values_at + value_bytes
    if properties_at + property_bytes != len(record):
        raise CorruptBatchError("the lengths do not add up", length=header.length)
    keys = record[keys_at:values_at]
    values = record[values_at:properties_at]
    properties = record[properties_at:]
    if last - first < count:
        before = kinds[:, :first].sum(axis=1, dtype=np.int64).tolist()
        kinds = kinds[:, first:last]
        sizes = kinds.sum(axis=1, dtype=np.int64).tolist()
        times = times[first:last]
        keys, values, properties = (
            blob[start : start + size]
            for blob, start, size in zip((keys, values, properties), before, sizes, strict=True)
        )
    return _Piece(times, kinds[0], kinds[1], kinds[2], keys, values, properties)


def _joined(parts: list[np.ndarray]) -> np.ndarray:
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _edges(lengths: list[np.ndarray]) -> np.ndarray:
    together = _joined(lengths)
    edges = np.zeros(len(together) + 1, dtype=np.int32)
    np.cumsum(together, dtype=np.int32, out=edges[1:])
    return edges


def _blobs(lengths: list[np.ndarray], blobs: list[memoryview]) -> pa.Array:
    edges = _edges(lengths)
    # One batch alone is not copied: its column is a view of the frame it came in.
    data = blobs[0] if len(blobs) == 1 else b"".join(blobs)
    return pa.Array.from_buffers(
        pa.binary(), len(edges) - 1, [None, pa.py_buffer(edges), pa.py_buffer(data)], null_count=0
    )


def _timestamps(sent_at_ns: list[np.ndarray]) -> pa.Array:
    times = _joined(sent_at_ns) // 1_000
    return pa.Array.from_buffers(
        pa.timestamp("us", tz="UTC"), len(times), [None, pa.py_buffer(times)], null_count=0
    )


def _shown(value: str | bytes) -> str:
    """A property as text; of bytes, base64."""
    return value if isinstance(value, str) else b64encode(value).decode()


def _maps(lengths: list[np.ndarray], blobs: list[memoryview]) -> pa.Array:
    """Properties as maps; only the messages that have any are decoded."""
    together = _joined(lengths)
    edges = np.zeros(len(together) + 1, dtype=np.int32)
    names: list[str] = []
    texts: list[str] = []
    if any(blobs):
        data = b"".join(blobs)
        starts = _edges(lengths)
        sizes = np.zeros(len(together), dtype=np.int32)
        for row in np.flatnonzero(together).tolist():
            properties = unpack_properties(data[starts[row] : starts[row + 1]])
            sizes[row] = len(properties)
            names += properties.keys()
            texts += map(_shown, properties.values())
        np.cumsum(sizes, dtype=np.int32, out=edges[1:])
    return pa.MapArray.from_arrays(
        pa.array(edges), pa.array(names, pa.string()), pa.array(texts, pa.string())
    )
