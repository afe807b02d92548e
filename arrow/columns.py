"""Converts the columns of batches to Arrow columns by slicing and joining buffers, without running
Python code per message. Pure.

    record   times i64×n │ lengths u32×3n │ keys │ values │ properties       one batch of the broker
                 │             │              │       │
                 ▼             ▼ cumsum       ▼       ▼  joined over the batches of one Arrow batch
    Arrow    timestamp      edges i32      key    value

    offset      long                 index in the partition, without gaps
    key         binary               order key; empty when the message was sent without one
    value       binary
    timestamp   timestamp            time of sending by the sender's clock, UTC
    properties  map<string, string>  empty when the message has none; bytes are shown as base64

    on request: stored (time of storing by the broker's clock, UTC), logical_partition (null
    without a key), producer

Arrays are created with `from_buffers`, because `pa.array` and `pa.scalar` import pandas if it is
installed, which costs 0.24 s and 47 MB.

Source: the columnar body of a batch; see protocol/batch.py.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

# pyarrow has no type annotations; this project's type checker is configured for that
import pyarrow as pa  # type: ignore[import-untyped, unused-ignore]

from ..protocol.batch import BYTES_PER_MESSAGE
from ..protocol.errors import CorruptBatchError
from ..protocol.limits import LOGICAL_PARTITIONS
from ..protocol.message import unpack_properties
from ..protocol.record import HEADER_BYTES, Header
from .column_hash import hash_column

TIME = pa.timestamp("us", tz="UTC")
TYPES: dict[str, pa.DataType] = {
    "offset": pa.int64(),
    "key": pa.binary(),
    "value": pa.binary(),
    "timestamp": TIME,
    "properties": pa.map_(pa.string(), pa.string()),
}
SCHEMA = pa.schema([pa.field(name, kind) for name, kind in TYPES.items()])


@dataclass(frozen=True, slots=True)
class Piece:
    """Consecutive messages of one batch. The lengths are u32 arrays; the blobs are views of the
    received frame.
    """

    sent_at_ns: np.ndarray
    key_lengths: np.ndarray
    value_lengths: np.ndarray
    property_lengths: np.ndarray
    keys: memoryview
    values: memoryview
    properties: memoryview
    stored_at_ms: int
    producer: str
    """The producer's session: its id as 16 hexadecimal digits, and its epoch."""

    @property
    def size_bytes(self) -> int:
        """The total size of keys, values and properties."""
        return len(self.keys) + len(self.values) + len(self.properties)


def column(name: str, pieces: Sequence[Piece], first_offset: int) -> pa.Array:
    """
    Return a column with the values of all `pieces`.

    Args:
        name: a name in TYPES, or "stored", "producer" or "logical_partition".
        pieces: pieces whose messages are consecutive.
        first_offset: the offset of the first message.
    """
    match name:
        case "offset":
            return offsets(first_offset, row_count(pieces))
        case "key":
            return _binary_array(
                [piece.key_lengths for piece in pieces], [piece.keys for piece in pieces]
            )
        case "value":
            return _binary_array(
                [piece.value_lengths for piece in pieces], [piece.values for piece in pieces]
            )
        case "timestamp":
            return numbers(TIME, _concatenate([piece.sent_at_ns for piece in pieces]) // 1_000)
        case "stored":
            times = np.array([piece.stored_at_ms for piece in pieces], np.int64) * 1_000
            return numbers(TIME, np.repeat(times, [len(piece.sent_at_ns) for piece in pieces]))
        case "producer":
            counts = [len(piece.sent_at_ns) for piece in pieces]
            return _repeated_strings([piece.producer for piece in pieces], counts)
        case "logical_partition":
            return _logical_partitions(pieces)
        case _:
            assert name == "properties"
            return _map_array(
                [piece.property_lengths for piece in pieces],
                [piece.properties for piece in pieces],
            )


def row_count(pieces: Sequence[Piece]) -> int:
    """Return the number of messages in all `pieces`."""
    return sum(len(piece.sent_at_ns) for piece in pieces)


def numbers(kind: pa.DataType, values: np.ndarray) -> pa.Array:
    """Return `values` as a fixed-width column without nulls."""
    assert values.dtype.itemsize * 8 == kind.bit_width
    return pa.Array.from_buffers(kind, len(values), [None, pa.py_buffer(values)], null_count=0)


def offsets(first: int, rows: int) -> pa.Array:
    """Return a column of the numbers from `first` to `first + rows - 1`."""
    return numbers(pa.int64(), np.arange(first, first + rows, dtype=np.int64))


def same_number(value: int, rows: int) -> pa.Array:
    """Return a column with `value` in every row."""
    return numbers(pa.int32(), np.full(rows, value, np.int32))


def same_text(text: str, rows: int) -> pa.Array:
    """Return a column with `text` in every row."""
    return _repeated_strings([text], [rows])


def record_batch(pieces: Sequence[Piece], first_offset: int) -> pa.RecordBatch:
    """Return a record batch with the columns of SCHEMA for all `pieces`."""
    return pa.RecordBatch.from_arrays(
        [column(name, pieces, first_offset) for name in SCHEMA.names], schema=SCHEMA
    )


def slice_piece(record: memoryview, header: Header, first: int, last: int) -> Piece:
    """Return messages `[first, last)` of a batch, counted from its start. Raises CorruptBatchError
    if the batch's lengths do not add up.
    """
    count = header.count
    times = np.frombuffer(record, "<i8", count, HEADER_BYTES)
    lengths = np.frombuffer(record, "<u4", 3 * count, HEADER_BYTES + 8 * count)
    kinds = lengths.reshape(3, count)
    key_bytes, value_bytes, property_bytes = kinds.sum(axis=1, dtype=np.int64).tolist()
    keys_start = HEADER_BYTES + BYTES_PER_MESSAGE * count
    values_start = keys_start + key_bytes
    properties_start = values_start + value_bytes
    if properties_start + property_bytes != len(record):
        raise CorruptBatchError("the lengths do not add up", length=header.length)
    keys = record[keys_start:values_start]
    values = record[values_start:properties_start]
    properties = record[properties_start:]
    if last - first < count:
        skipped = kinds[:, :first].sum(axis=1, dtype=np.int64).tolist()
        kinds = kinds[:, first:last]
        sizes = kinds.sum(axis=1, dtype=np.int64).tolist()
        times = times[first:last]
        keys, values, properties = (
            blob[start : start + size]
            for blob, start, size in zip((keys, values, properties), skipped, sizes, strict=True)
        )
    return Piece(
        times,
        kinds[0],
        kinds[1],
        kinds[2],
        keys,
        values,
        properties,
        header.appended_at_ms,
        f"{header.producer_id:016x}-{header.producer_epoch}",
    )


def _concatenate(parts: list[np.ndarray]) -> np.ndarray:
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _cumulative_edges(lengths: list[np.ndarray]) -> np.ndarray:
    all_lengths = _concatenate(lengths)
    edges = np.zeros(len(all_lengths) + 1, dtype=np.int32)
    np.cumsum(all_lengths, dtype=np.int32, out=edges[1:])
    return edges


def _binary_array(lengths: list[np.ndarray], blobs: list[memoryview]) -> pa.Array:
    edges = _cumulative_edges(lengths)
    # A single batch is not copied: its column is a view of the received frame.
    data = blobs[0] if len(blobs) == 1 else b"".join(blobs)
    return pa.Array.from_buffers(
        pa.binary(), len(edges) - 1, [None, pa.py_buffer(edges), pa.py_buffer(data)], null_count=0
    )


def _string_array(texts: Sequence[str]) -> pa.Array:
    encoded = [text.encode() for text in texts]
    edges = np.zeros(len(encoded) + 1, dtype=np.int32)
    np.cumsum(np.fromiter(map(len, encoded), np.int32, len(encoded)), out=edges[1:])
    buffers = [None, pa.py_buffer(edges), pa.py_buffer(b"".join(encoded))]
    return pa.Array.from_buffers(pa.string(), len(encoded), buffers, null_count=0)


def _repeated_strings(texts: Sequence[str], counts: Sequence[int]) -> pa.Array:
    """Return a column that repeats each text the given number of times."""
    encoded = [text.encode() for text in texts]
    lengths = np.repeat(np.array([len(text) for text in encoded], np.uint32), counts)
    edges = _cumulative_edges([lengths])
    data = b"".join(text * count for text, count in zip(encoded, counts, strict=True))
    buffers = [None, pa.py_buffer(edges), pa.py_buffer(data)]
    return pa.Array.from_buffers(pa.string(), len(lengths), buffers, null_count=0)


def _logical_partitions(pieces: Sequence[Piece]) -> pa.Array:
    lengths = [piece.key_lengths for piece in pieces]
    blob = np.frombuffer(b"".join(piece.keys for piece in pieces), np.uint8)
    edges = _cumulative_edges(lengths).astype(np.int64)
    partitions = (hash_column(blob, edges) % np.uint64(LOGICAL_PARTITIONS)).astype(np.int32)
    keyed = _concatenate(lengths) > 0
    valid = None if keyed.all() else pa.py_buffer(np.packbits(keyed, bitorder="little"))
    return pa.Array.from_buffers(pa.int32(), len(partitions), [valid, pa.py_buffer(partitions)])


def _property_text(value: str | bytes) -> str:
    """Return a property's value as text; bytes are encoded as base64."""
    return value if isinstance(value, str) else b64encode(value).decode()


def _map_array(lengths: list[np.ndarray], blobs: list[memoryview]) -> pa.Array:
    """Return the properties as a column of maps; only rows that have properties are decoded."""
    all_lengths = _concatenate(lengths)
    edges = np.zeros(len(all_lengths) + 1, dtype=np.int32)
    names: list[str] = []
    texts: list[str] = []
    if any(blobs):
        data = b"".join(blobs)
        starts = _cumulative_edges(lengths)
        sizes = np.zeros(len(all_lengths), dtype=np.int32)
        for row in np.flatnonzero(all_lengths).tolist():
            properties = unpack_properties(data[starts[row] : starts[row + 1]])
            sizes[row] = len(properties)
            names += properties.keys()
            texts += map(_property_text, properties.values())
        np.cumsum(sizes, dtype=np.int32, out=edges[1:])
    return pa.MapArray.from_arrays(
        numbers(pa.int32(), edges), _string_array(names), _string_array(texts)
    )
