"""A batch of messages of one partition as bytes: a record header and a columnar body.  Pure.

    body, little-endian, `count` messages:
    ┌──────────────────┬───────────────┬─────────────────┬──────────────────────┐
    │ sent_at_ns  i64×n│ key bytes u32×n│ value bytes u32×n│ property bytes u32×n │
    ├──────────────────┴───────┬───────┴─────────────────┴──┬───────────────────┤
    │ keys, one after another  │ values, one after another   │ properties        │
    └──────────────────────────┴─────────────────────────────┴───────────────────┘

Invariants
    The lengths add up to the body exactly, or the whole batch is refused.
    Python loops per message only in the two joins of the writer and in the slicing of the reader.

Source: columns because Arrow arrays are these buffers; see `spark/rows.py`.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

from .errors import CorruptBatchError
from .limits import BATCH_BYTES_MAX, BATCH_COUNT_MAX
from .record import HEADER_BYTES, Codec, Header, Kind, encode_record, read_record

BYTES_PER_MESSAGE = 8 + 3 * 4
"""Overhead of a message in a batch: its time and three lengths."""


def encode_batch(
    *,
    partition_id: int,
    sent_at_ns: Sequence[int],
    keys: Sequence[bytes],
    values: Sequence[bytes],
    properties: Sequence[bytes] = (),
    producer_id: int,
    producer_epoch: int,
    sequence: int,
) -> bytes:
    """
    Pack messages into a batch, oldest first.

    All columns have the same length.  An empty `properties` means that no message has properties.
    `sequence` is the first message's; the others follow without gap.
    """
    count = len(values)
    assert 0 < count <= BATCH_COUNT_MAX
    assert len(keys) == len(sent_at_ns) == count
    lengths = struct.Struct(f"<{count}I")
    blobs = b"".join(properties)
    body = b"".join(
        (
            struct.pack(f"<{count}q", *sent_at_ns),
            lengths.pack(*map(len, keys)),
            lengths.pack(*map(len, values)),
            lengths.pack(*map(len, properties)) if blobs else bytes(4 * count),
            *keys,
            *values,
            blobs,
        )
    )
    return encode_record(
        body,
        kind=Kind.MESSAGES,
        count=count,
        partition_id=partition_id,
        first_sent_at_ns=sent_at_ns[0],
        last_sent_at_ns=sent_at_ns[-1],
        producer_id=producer_id,
        producer_epoch=producer_epoch,
        sequence=sequence,
    )


def join_columns(
    sent_at_ns: bytes,
    key_lengths: bytes,
    value_lengths: bytes,
    keys: bytes | memoryview,
    values: bytes | memoryview,
    *,
    count: int,
) -> bytes:
    """The body of `count` messages without properties, from columns that have the bytes of the layout already."""
    return b"".join((sent_at_ns, key_lengths, value_lengths, bytes(4 * count), keys, values))


def split_columns(body: bytes, count: int) -> tuple[list[bytes], list[bytes]]:
    """The keys and the values of a body that `join_columns` made."""
    lengths: array[int] = array("I")
    lengths.frombytes(body[8 * count : 16 * count])
    edges = list(accumulate(lengths, initial=BYTES_PER_MESSAGE * count))
    blobs = [body[start:end] for start, end in pairwise(edges)]
    return blobs[:count], blobs[count:]


def check_batch(data: bytes | memoryview, start: int = 0) -> Header:
    """
    Check the message batch at `start`, as a broker does with each batch it receives, and return its header.

    Raises:
        CorruptBatchError: the bytes are cut or damaged, the record is not a message batch, or its codec is unknown.
    """
    header = read_record(data, start)
    if not isinstance(header, Header):
        reason = getattr(header, "reason", "cut short")
        raise CorruptBatchError(f"not a batch: {reason}", reason=reason)
    if header.kind != Kind.MESSAGES or header.codec != Codec.NONE:
        raise CorruptBatchError("not a message batch", kind=header.kind, codec=header.codec)
    columns = header.count * BYTES_PER_MESSAGE
    if not 0 < header.count <= BATCH_COUNT_MAX or HEADER_BYTES + columns > header.length:
        raise CorruptBatchError("the count does not fit the length", count=header.count)
    if header.length > BATCH_BYTES_MAX:
        raise CorruptBatchError("the batch is too long", length=header.length)
    return header


def check_lengths(data: bytes | memoryview, header: Header, start: int = 0) -> None:
    """
    Check that the lengths in the batch at `start` add up, so that every stored batch can be cut into messages.

    Raises:
        CorruptBatchError: the lengths do not add up to the body.
    """
    first = start + HEADER_BYTES + 8 * header.count
    lengths: array[int] = array("I")
    lengths.frombytes(memoryview(data)[first : first + 12 * header.count])
    total = HEADER_BYTES + BYTES_PER_MESSAGE * header.count + sum(lengths)
    if total != header.length:
        raise CorruptBatchError("the lengths do not add up", length=header.length, found=total)


class Columns(NamedTuple):
    """The columns of a batch: times, and for keys, values and properties `count + 1` edges into `blob`."""

    sent_at_ns: array[int]
    key_edges: list[int]
    value_edges: list[int]
    property_edges: list[int]
    blob: bytes
    """The whole record; an edge is an index of a byte in it."""


def columns(data: bytes | memoryview, header: Header, start: int = 0) -> Columns:
    """
    Cut the body of the batch at `start` into columns.

    Raises:
        CorruptBatchError: the lengths do not add up to the body.
    """
    count = header.count
    view = memoryview(data)[start : start + header.length]
    first = HEADER_BYTES
    times: array[int] = array("q")
    times.frombytes(view[first : first + 8 * count])
    lengths: array[int] = array("I")
    assert lengths.itemsize == 4
    lengths.frombytes(view[first + 8 * count : first + BYTES_PER_MESSAGE * count])
    edges = list(accumulate(lengths, initial=first + BYTES_PER_MESSAGE * count))
    if edges[-1] != header.length:
        raise CorruptBatchError("the lengths do not add up", length=header.length, found=edges[-1])
    return Columns(
        times,
        edges[: count + 1],
        edges[count : 2 * count + 1],
        edges[2 * count :],
        view.tobytes() if not isinstance(data, bytes) or len(view) != len(data) else data,
    )


def batch_starts(data: bytes | memoryview) -> list[tuple[int, Header]]:
    """
    Check the batches that lie one after another in `data`, and return the start and header of each.

    Raises:
        CorruptBatchError: as `check_batch`.
    """
    batches = []
    start = 0
    while start < len(data):
        header = check_batch(data, start)
        batches.append((start, header))
        start += header.length
    return batches
