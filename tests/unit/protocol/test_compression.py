"""Packed batches: what is packed, what a broker refuses by its lengths, and what a reader refuses
to unpack.
"""

from __future__ import annotations

import struct

import lz4.block
import pytest

from keylane.protocol.batch import (
    BYTES_PER_MESSAGE,
    check_batch,
    check_lengths,
    columns,
    encode_batch,
    unpack_batch,
)
from keylane.protocol.errors import CorruptBatchError, RetryRule, UnpackError
from keylane.protocol.limits import BATCH_BYTES_MAX, MESSAGE_BYTES_MAX, UNPACKED_RATIO_MAX
from keylane.protocol.record import HEADER_BYTES, Compression, Kind, encode_record
from support.zstd import zstd

PACKED = (Compression.ZSTD, Compression.LZ4)
PACK = {
    Compression.ZSTD: zstd.compress,
    Compression.LZ4: lambda data: lz4.block.compress(data, store_size=False),
}


def batch(values: list[bytes], compression: Compression) -> bytes:
    return encode_batch(
        partition_id=1,
        sent_at_ns=[7] * len(values),
        keys=[b"key"] * len(values),
        values=values,
        producer_id=3,
        producer_epoch=0,
        sequence=0,
        compression=compression,
    )


def forged(compression: Compression, said: int, blob: bytes) -> bytes:
    """A batch of one message with right checksums, whose lengths say that `blob` unpacks to `said`
    bytes.
    """
    body = bytes(8) + struct.pack("<III", 0, said, 0) + blob
    return encode_record(body, kind=Kind.MESSAGES, count=1, compression=compression)


@pytest.mark.parametrize("compression", PACKED)
def test_batch_of_text_gets_shorter_and_reads_the_same(compression):
    """Times and lengths stay as they are; the unpacked batch is the other one, but for its
    header.
    """
    values = [b'{"carrier": "UA", "flight": %d}' % number for number in range(500)]
    plain, packed = batch(values, Compression.NONE), batch(values, compression)
    header = check_batch(packed)
    check_lengths(packed, header)
    columns_end = HEADER_BYTES + BYTES_PER_MESSAGE * 500
    assert header.compression == compression
    assert packed[HEADER_BYTES:columns_end] == plain[HEADER_BYTES:columns_end]
    assert len(packed) - columns_end < (len(plain) - columns_end) / 3
    assert bytes(unpack_batch(b"12" + packed, header, 2))[HEADER_BYTES:] == plain[HEADER_BYTES:]
    assert columns(packed, header)[:4] == columns(plain, check_batch(plain))[:4]


@pytest.mark.parametrize("compression", PACKED)
@pytest.mark.parametrize("value", [b"", b"x", bytes(range(256)), bytes(1 << 19)])
def test_batch_is_not_packed_when_it_gets_no_shorter_or_too_short(compression, value):
    """A batch that would unpack to more than 64 times its size is stored as it is."""
    assert batch([value], compression) == batch([value], Compression.NONE)


@pytest.mark.parametrize("compression", PACKED)
def test_largest_message_is_packed(compression):
    line = bytes(range(256)) * 40
    values = [(line * 110)[: MESSAGE_BYTES_MAX - 3]]
    packed = batch(values, compression)
    header = check_batch(packed)
    check_lengths(packed, header)
    cut = columns(packed, header)
    assert cut.blob[slice(*cut.value_edges)] == values[0]


@pytest.mark.parametrize("compression", PACKED)
@pytest.mark.parametrize("said", [BATCH_BYTES_MAX, 1 << 31, (1 << 32) - 1])
def test_broker_and_reader_refuse_a_batch_when_its_lengths_are_over_the_limit(compression, said):
    record = forged(compression, said, PACK[compression](bytes(1 << 20)) + bytes(1 << 18))
    header = check_batch(record)
    for read in (check_lengths, columns, unpack_batch):
        with pytest.raises(CorruptBatchError, match="more than is allowed"):
            read(record, header)


@pytest.mark.parametrize("compression", PACKED)
def test_broker_refuses_a_batch_when_it_is_too_short_for_its_lengths(compression):
    """64 times is allowed, one byte more is not."""
    blob = PACK[compression](bytes(60_000))
    most = UNPACKED_RATIO_MAX * (BYTES_PER_MESSAGE + len(blob)) - BYTES_PER_MESSAGE
    check_lengths(forged(compression, most, blob), check_batch(forged(compression, most, blob)))
    over = forged(compression, most + 1, blob)
    with pytest.raises(CorruptBatchError, match="more than is allowed"):
        check_lengths(over, check_batch(over))


@pytest.mark.parametrize("compression", PACKED)
@pytest.mark.parametrize("said", [0, 999, 1_001, 5_000])
def test_reader_refuses_a_batch_when_it_unpacks_to_another_size(compression, said):
    """A frame that says the right size and has another content as well."""
    blob = PACK[compression](b"0123456789" * 100)
    record = forged(compression, said, blob + bytes(200) if said > 2_000 else blob)
    with pytest.raises(CorruptBatchError, match="unpack"):
        columns(record, check_batch(record))


def test_reader_unpacks_no_bomb():
    """A megabyte of a few bytes behind a frame that says to be small; a frame that does not say its
    size; two frames.
    """
    unsized = {zstd.CompressionParameter.content_size_flag: 0}
    bomb = zstd.compress(bytes(1 << 20), options=unsized)
    two = PACK[Compression.ZSTD](b"x" * 100) + PACK[Compression.ZSTD](bytes(1 << 20))
    for said, blob in ((100, bomb), (100, two), (1 << 20, bomb + bytes(1 << 15))):
        record = forged(Compression.ZSTD, said, blob)
        with pytest.raises(CorruptBatchError, match="unpack"):
            columns(record, check_batch(record))
    record = forged(Compression.LZ4, 100, PACK[Compression.LZ4](bytes(1 << 20)))
    with pytest.raises(CorruptBatchError, match="unpack"):
        columns(record, check_batch(record))


def test_unknown_compression_is_refused():
    record = forged(3, 4, b"abcd")
    with pytest.raises(CorruptBatchError, match="not a message batch"):
        check_batch(record)


@pytest.mark.parametrize("compression", PACKED)
def test_reader_is_told_how_to_pass_a_batch_when_it_does_not_unpack(compression):
    """Where it is, how many messages it has, and what helps: to send it again is the advice for
    another one.
    """
    blob = PACK[compression](b"0123456789" * 100)
    body = bytes(8) + struct.pack("<III", 0, 1_001, 0) + blob
    record = encode_record(
        body, kind=Kind.MESSAGES, count=1, compression=compression, partition_id=9, base_offset=41
    )
    with pytest.raises(UnpackError) as met:
        columns(record, check_batch(record))
    assert (met.value.partition_id, met.value.offset, met.value.count) == (9, 41, 1)
    assert "group reset" in met.value.hint
    assert "Send it again" not in met.value.hint
    assert met.value.retry is RetryRule.NEVER
