"""Batches and frames with anything in them, and decoders fed anything at all."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from itertools import pairwise

from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from keylane.protocol import frames
from keylane.protocol.batch import (
    SAME_SIZE_BLOCK,
    batch_starts,
    check_batch,
    check_lengths,
    columns,
    encode_batch,
    encode_body,
    join_columns,
    slice_column,
)
from keylane.protocol.errors import CorruptBatchError, FrameError
from keylane.protocol.message import pack_properties, unpack_properties
from keylane.protocol.record import (
    HEADER_BYTES,
    Compression,
    Header,
    IncompleteRecord,
    InvalidRecord,
    Kind,
    encode_record,
    read_record,
)
from support.running.examples import examples

blobs = st.binary(max_size=40)
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
times = st.integers(-(2**63), 2**63 - 1)
messages = st.lists(
    st.tuples(times, blobs, blobs, st.dictionaries(texts, texts, max_size=3)),
    min_size=1,
    max_size=20,
)
u64 = st.integers(0, 2**64 - 1)


def sliced(blob: bytes, edges: Sequence[int]) -> list[bytes]:
    """What lies between each two edges, cut one by one; what the product cuts is the same."""
    values = [blob[start:end] for start, end in pairwise(edges)]
    assert slice_column(blob, edges) == values
    return values


@given(st.integers(0, 9), st.integers(1, 3 * SAME_SIZE_BLOCK + 1), st.binary(min_size=1))
def test_values_of_one_size_are_cut_in_blocks(size, count, seed):
    """Whole blocks, and what is left; also where the size is 0."""
    values = [(seed * (size + 1))[n % len(seed) :][:size] for n in range(count)]
    keys = [b"%d" % n for n in range(count)]
    data = encode_batch(
        partition_id=1,
        sent_at_ns=[1] * count,
        keys=keys,
        values=values,
        producer_id=1,
        producer_epoch=0,
        sequence=0,
    )
    cut = columns(data, check_batch(data))
    assert sliced(cut.blob, cut.value_edges) == values
    assert sliced(cut.blob, cut.key_edges) == keys


@given(
    messages, u64, u64, st.integers(0, 2**32 - 1), u64, blobs, blobs, st.sampled_from(Compression)
)
@settings(deadline=None)
def test_batch_reads_back_as_it_was_written(
    rows, partition_id, producer, epoch, sequence, pre, post, compression
):
    """Whatever the messages, the batch gives back their columns, wherever it lies in a buffer."""
    sent_at_ns, keys, values, properties = (list(column) for column in zip(*rows, strict=True))
    packed = [pack_properties(mapping) for mapping in properties]
    data = encode_batch(
        partition_id=partition_id,
        sent_at_ns=sent_at_ns,
        keys=keys,
        values=values,
        properties=packed if any(packed) else (),
        producer_id=producer,
        producer_epoch=epoch,
        sequence=sequence,
        compression=compression,
    )
    around = pre + data + post
    header = check_batch(memoryview(around), len(pre))
    assert (header.count, header.length) == (len(rows), len(data))
    assert (header.partition_id, header.producer_id) == (partition_id, producer)
    assert (header.producer_epoch, header.sequence) == (epoch, sequence)
    assert (header.first_sent_at_ns, header.last_sent_at_ns) == (sent_at_ns[0], sent_at_ns[-1])
    cut = columns(around, header, len(pre))
    check_lengths(around, header, len(pre))
    assert header.compression != Compression.NONE or cut.blob == data
    assert cut.sent_at_ns.tolist() == sent_at_ns
    assert sliced(cut.blob, cut.key_edges) == keys
    assert sliced(cut.blob, cut.value_edges) == values
    unpacked = [unpack_properties(mapping) for mapping in sliced(cut.blob, cut.property_edges)]
    assert unpacked == properties


@given(st.binary(max_size=400), st.integers(0, 450))
@example(b"BKL1" + bytes(92), 0)
@settings(deadline=None)
def test_any_bytes_are_a_record_or_short_or_wrong(data, start):
    """The reader of records never raises, whatever it is given; the checks above it raise typed
    errors only.
    """
    assert isinstance(read_record(data, start), Header | IncompleteRecord | InvalidRecord)
    try:
        check_batch(data, start)
    except CorruptBatchError:
        pass
    try:
        batch_starts(data)
    except CorruptBatchError:
        pass


@given(
    st.binary(max_size=300),
    st.integers(0, 2**32 - 1) | st.integers(1, 3),
    st.integers(0, 2**32 - 1),
    st.sampled_from(Compression),
)
@settings(deadline=None)
def test_record_with_right_checksums_and_any_body_is_columns_or_a_typed_error(
    body, count, partition, compression
):
    """A hostile sender can make the checksums right, and still gets no further than a typed
    error.
    """
    record = encode_record(
        body, kind=Kind.MESSAGES, count=count, partition_id=partition, compression=compression
    )
    try:
        cut = columns(record, check_batch(record))
    except CorruptBatchError:
        return
    assert cut.property_edges[-1] == len(cut.blob)
    assert len(cut.key_edges) == len(cut.value_edges) == len(cut.property_edges) == count + 1
    assert cut.key_edges[0] == HEADER_BYTES + 20 * count


@given(
    st.one_of(
        st.binary(max_size=200), st.binary(max_size=60).map(lambda b: bytes([len(b), 0, 0, 0]) + b)
    )
)
@settings(max_examples=examples(400), deadline=None)
def test_any_bytes_are_a_frame_or_a_frame_error(data):
    """Decoding arbitrary bytes raises FrameError and nothing else."""
    for decode in (frames.decode_request, frames.decode_answer):
        try:
            decode(data)
        except FrameError:
            pass


names = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
i64 = st.integers(-(2**63), 2**63 - 1)
any_frame = st.one_of(
    st.builds(frames.Append, i64),
    st.builds(frames.Acquire, i64, names, names, i64, i64),
    st.builds(frames.Pull, i64, names, names, i64, i64, i64, i64),
    st.builds(
        frames.Ack,
        i64,
        names,
        names,
        i64,
        st.lists(st.tuples(i64, i64), max_size=5).map(tuple),
    ),
    st.builds(frames.Release, i64, names, names, i64),
    st.builds(frames.Read, i64, i64, i64),
)


@given(u64, any_frame, blobs)
@settings(deadline=None)
def test_request_reads_back_as_it_was_written(number, request, payload):
    """Whatever its fields, a request and its payload arrive as they were sent."""
    data = frames.encode_frame(number, request, payload)
    assert frames.decode_request(data) == (number, request, payload)


@given(
    st.sampled_from([Compression.ZSTD, Compression.LZ4]),
    st.binary(min_size=1, max_size=20),
    st.integers(30, 60),
    st.data(),
)
@settings(deadline=None)
def test_packed_body_reads_as_it_was_or_is_refused_when_a_bit_of_it_changes(
    compression, value, repeats, data
):
    """With right checksums: what is read has the size that the lengths say, or the batch is refused
    with a typed error.
    """
    body = join_columns(
        bytes(8), bytes(4), struct.pack("<I", repeats * len(value)), (), [value] * repeats, count=1
    )
    record = encode_body(body, count=1, compression=compression)
    assume(check_batch(record).compression == compression)  # a short body is stored as it is
    packed = bytearray(record[HEADER_BYTES:])
    bit = data.draw(st.integers(0, 8 * len(packed) - 1))
    packed[bit // 8] ^= 1 << bit % 8
    changed = encode_record(bytes(packed), kind=Kind.MESSAGES, count=1, compression=compression)
    try:
        header = check_batch(changed)
        cut = columns(changed, header)
    except CorruptBatchError:
        return
    assert len(cut.blob) == cut.property_edges[-1] <= 64 * len(changed)
