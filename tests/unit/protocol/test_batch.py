"""Batches: every damage is found, every cut is told apart, and nothing is taken for something
else.
"""

from __future__ import annotations

import struct

import pytest
from msgspec.structs import replace

from keylane.protocol.batch import (
    batch_starts,
    check_batch,
    check_lengths,
    column_views,
    columns,
    encode_batch,
    encode_body,
    join_columns,
    largest_message,
    slice_column,
)
from keylane.protocol.errors import CorruptBatchError, MessageTooLargeError
from keylane.protocol.limits import (
    BATCH_BYTES_MAX,
    BATCH_COUNT_MAX,
    KEY_BYTES_MAX,
    MESSAGE_BYTES_MAX,
)
from keylane.protocol.record import (
    HEADER_BYTES,
    RECORD_BYTES_MAX,
    Compression,
    Header,
    IncompleteRecord,
    InvalidRecord,
    Kind,
    encode_record,
    read_header,
    read_record,
    stamp_record,
)


def batch(count: int = 2, *, sequence: int = 0, value: bytes = b"value") -> bytes:
    return encode_batch(
        partition_id=3,
        sent_at_ns=[10**18 + number for number in range(count)],
        keys=[b"k%d" % number for number in range(count)],
        values=[value] * count,
        properties=[b"\x81\xa1a\xa1b", *[b""] * (count - 1)],
        producer_id=1,
        producer_epoch=1,
        sequence=sequence,
    )


def test_every_flipped_bit_is_found():
    """No single damaged bit of a batch, header or body, goes unnoticed, and each is a typed
    error.
    """
    good = batch()
    check_batch(good)
    for bit in range(8 * len(good)):
        damaged = bytearray(good)
        damaged[bit // 8] ^= 1 << bit % 8
        assert isinstance(read_record(damaged), InvalidRecord), bit
        with pytest.raises(CorruptBatchError):
            check_batch(damaged)


def test_every_cut_is_short_and_not_wrong():
    """A batch cut at any byte reads as Short with the length it wants, so a torn tail is told from
    damage.
    """
    good = batch()
    for length in range(len(good)):
        cut = read_record(good[:length])
        assert cut == IncompleteRecord(len(good) if length >= HEADER_BYTES else HEADER_BYTES), (
            length
        )
        with pytest.raises(CorruptBatchError):
            check_batch(good[:length])


def test_every_flipped_bit_after_a_cut_is_still_no_batch():
    """A batch both cut and damaged is never taken for a batch."""
    good = batch()
    for bit in range(0, 8 * len(good), 7):
        damaged = bytearray(good)
        damaged[bit // 8] ^= 1 << bit % 8
        for length in range(0, len(good), 13):
            assert not isinstance(read_record(damaged[:length]), Header)


def test_batch_in_the_middle_of_other_bytes_is_read_at_its_start():
    """`start` points at a batch among others; nothing before it matters."""
    data = b"junk!" + batch(3) + batch(1, sequence=3)
    header = check_batch(data, 5)
    assert (header.count, header.sequence) == (3, 0)
    after = check_batch(memoryview(data), 5 + header.length)
    assert (after.count, after.sequence) == (1, 3)
    cut = columns(data, header, 5)
    assert cut.blob == batch(3)
    assert [cut.blob[a:b] for a, b in zip(cut.key_edges, cut.key_edges[1:], strict=False)] == [
        b"k0",
        b"k1",
        b"k2",
    ]


def test_stamping_changes_three_fields_and_keeps_the_body():
    """The broker's stamp sets offset, position and time; all else, the body's checksum too,
    stays.
    """
    good = batch()
    before = check_batch(good)
    record = bytearray(good)
    stamp_record(record, base_offset=2**62, position=2**40, appended_at_ms=5)
    after = check_batch(record)
    assert after == replace(before, base_offset=2**62, position=2**40, appended_at_ms=5)
    assert after.next_offset == 2**62 + 2
    assert record[HEADER_BYTES:] == good[HEADER_BYTES:]


def test_batches_one_after_another_are_all_found():
    """`batch_starts` finds each batch, and a tail that is none is an error."""
    parts = [batch(2), batch(1, sequence=2), batch(5, sequence=3)]
    data = b"".join(parts)
    batches = batch_starts(data)
    assert [start for start, _ in batches] == [0, len(parts[0]), len(parts[0]) + len(parts[1])]
    assert [header.count for _, header in batches] == [2, 1, 5]
    assert batch_starts(b"") == []
    with pytest.raises(CorruptBatchError):
        batch_starts(data + b"\0")
    with pytest.raises(CorruptBatchError):
        batch_starts(data[:-1])


def test_largest_message_fits_a_batch():
    """One message of the largest size makes a batch that is let through."""
    assert check_batch(batch(1, value=bytes(MESSAGE_BYTES_MAX - 2 - 5))).length <= BATCH_BYTES_MAX


def too_long() -> bytes:
    """The beginning of a record that says to be longer than any is."""
    record = bytearray(encode_record(bytes(20), kind=Kind.MESSAGES, count=1))
    struct.pack_into("<I", record, 8, RECORD_BYTES_MAX + 1)
    stamp_record(record, base_offset=0, position=0, appended_at_ms=0)
    return bytes(record)


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        (encode_record(b"", kind=Kind.SEAL), "not a message batch"),
        (encode_record(bytes(20), kind=Kind.CURSOR, count=1), "not a message batch"),
        (
            encode_record(bytes(20), kind=Kind.MESSAGES, count=1, compression=9),
            "not a message batch",
        ),
        (encode_record(bytes(20), kind=Kind.MESSAGES, count=0), "the count does not match"),
        (encode_record(bytes(19), kind=Kind.MESSAGES, count=1), "the count does not match"),
        (encode_record(bytes(20), kind=Kind.MESSAGES, count=2**32 - 1), "the count does not match"),
        (
            encode_record(bytes(20 * 2**15 + 20), kind=Kind.MESSAGES, count=BATCH_COUNT_MAX + 1),
            "the count does not match",
        ),
        (too_long(), "length"),
    ],
    ids=range(8),
)
def test_whole_record_that_is_no_message_batch_is_refused(record, reason):
    """Right checksums do not make a batch: kind, compression, count and length have to fit as
    well.
    """
    with pytest.raises(CorruptBatchError, match=reason):
        check_batch(record)


def test_record_too_large_to_be_read_is_not_made():
    """The longest record reads back; one that is a byte longer is a typed error when it is made."""
    body = bytes(RECORD_BYTES_MAX - HEADER_BYTES)
    header = read_record(encode_record(body, kind=Kind.STATE))
    assert isinstance(header, Header)
    assert header.length == RECORD_BYTES_MAX
    with pytest.raises(MessageTooLargeError):
        encode_record(body + b"\0", kind=Kind.STATE)


def test_lengths_that_do_not_add_up_are_refused():
    """A body whose lengths claim more or less than it has is refused whole by the reader."""
    for lengths in ([1, 0, 0], [3, 0, 0], [2**32 - 1, 2, 1], [0, 0, 0]):
        body = bytes(8) + b"".join(number.to_bytes(4, "little") for number in lengths) + b"ab"
        record = encode_record(body, kind=Kind.MESSAGES, count=1)
        with pytest.raises(CorruptBatchError, match="do not add up"):
            columns(record, check_batch(record))
        # A key of 4 GB is none that is too large: the lengths lie.
        with pytest.raises(CorruptBatchError, match="do not add up"):
            check_lengths(record, check_batch(record))


@pytest.mark.parametrize("version", [0, 2, 255])
def test_another_version_is_wrong_even_with_a_right_checksum(version):
    """A record of another format version is not read by guesswork."""
    import crc32c

    record = bytearray(batch())
    record[12] = version
    record[4:8] = crc32c.crc32c(bytes(record[8:HEADER_BYTES])).to_bytes(4, "little")
    assert read_header(record) == InvalidRecord(f"version {version}")


def test_lengths_that_lie_are_found_without_cutting_the_batch():
    """A batch whose checksums hold but whose lengths do not add up is refused before it is
    stored.
    """
    data = bytearray(
        encode_batch(
            partition_id=1,
            sent_at_ns=[1, 2],
            keys=[b"a", b"b"],
            values=[b"x", b"yz"],
            producer_id=1,
            producer_epoch=0,
            sequence=0,
        )
    )
    header = check_batch(bytes(data))
    check_lengths(bytes(data), header)
    data[HEADER_BYTES + 16] += 1
    with pytest.raises(CorruptBatchError, match="add up"):
        check_lengths(bytes(data), header)


@pytest.mark.parametrize("compression", list(Compression))
def test_key_over_the_limit_is_refused_whatever_sent_it(compression):
    """Producers refuse it; a broker took it from others, and no consumer could set its messages
    aside.
    """
    for key_bytes in (KEY_BYTES_MAX, KEY_BYTES_MAX + 1):
        batch = encode_batch(
            partition_id=7,
            sent_at_ns=[1, 2],
            keys=[b"a", b"k" * key_bytes],
            values=[b"x", b"y"],
            producer_id=1,
            producer_epoch=0,
            sequence=0,
            compression=compression,
        )
        if key_bytes <= KEY_BYTES_MAX:
            check_lengths(batch, check_batch(batch))
            continue
        with pytest.raises(MessageTooLargeError, match="order key too large"):
            check_lengths(batch, check_batch(batch))


@pytest.mark.parametrize("compression", list(Compression))
def test_largest_message_is_found_when_the_batch_is_packed(compression: Compression):
    """Lengths are not packed, so nothing is unpacked; key, value and properties count together."""
    data = encode_batch(
        partition_id=3,
        sent_at_ns=[1, 2, 3],
        keys=[b"k" * 100, b"", b"k"],
        values=[b"v" * 2_000, b"v" * 2_050, b"v"],
        properties=[b"", b"", b"p" * 2_100],
        producer_id=1,
        producer_epoch=1,
        sequence=0,
        compression=compression,
    )
    assert largest_message(memoryview(b"before" + data), check_batch(data), 6) == 2_102


@pytest.mark.parametrize("properties", [b"", b"\x81\xa1a\xa1b"])
@pytest.mark.parametrize("compression", list(Compression))
def test_batch_of_one_message_is_as_one_of_several_when_it_is_made_and_cut(properties, compression):
    """It has shorter ways; the bytes and the columns are those of the longer ones."""
    fields = {"partition_id": 3, "producer_id": 1, "producer_epoch": 2, "sequence": 9}
    key, value, sent_at_ns = b"k", b"v" * 5_000, 10**18
    lengths = [struct.pack("<I", len(part)) for part in (key, value, properties)]
    body = join_columns(
        struct.pack("<q", sent_at_ns),
        *lengths[:2],
        [key],
        [value],
        count=1,
        property_lengths=lengths[2],
        properties=[properties],
    )
    times = {"first_sent_at_ns": sent_at_ns, "last_sent_at_ns": sent_at_ns}
    long_way = encode_body(body, count=1, compression=compression, **fields, **times)
    data = encode_batch(
        sent_at_ns=[sent_at_ns],
        keys=[key],
        values=[value],
        properties=[properties] if properties else (),
        compression=compression,
        **fields,
    )
    assert data == long_way
    cut = column_views(data, check_batch(data))
    assert cut.sent_at_ns.tolist() == [sent_at_ns]
    parts = [
        slice_column(cut.blob, edges)
        for edges in (cut.key_edges, cut.value_edges, cut.property_edges)
    ]
    assert parts == [[key], [value], [properties]]


@pytest.mark.parametrize("column", range(3))
@pytest.mark.parametrize("more", [-1, 1])
def test_batch_of_one_message_is_not_cut_when_its_lengths_do_not_add_up(column, more):
    lengths = [1, 5, 3]
    lengths[column] += more
    body = struct.pack("<qIII", 0, *lengths) + b"k" + b"value" + b"\x80\x80\x80"
    data = encode_record(body, kind=Kind.MESSAGES, count=1)
    with pytest.raises(CorruptBatchError, match="add up"):
        column_views(data, check_batch(data))
