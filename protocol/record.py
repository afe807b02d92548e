"""The header at the beginning of every record of the commit log and every batch on the wire. Pure.

     0        4            8        12   13    14     15     16         20       24
     ┌────────┬────────────┬────────┬────┬─────┬──────┬──────┬──────────┬────────┐
     │ magic  │ header_crc │ length │ver │kind │comp. │flags │ body_crc │ count  │
     ├────────┴────────────┼────────┴────┴─────┴──────┴──────┼──────────┴────────┤
  24 │ partition_id     u64│ base_offset                  u64│ position       u64│
     ├─────────────────────┼─────────────────────────────────┼───────────────────┤
  48 │ first_sent_at_ns i64│ last_sent_at_ns              i64│ appended_at_ms i64│
     ├─────────────────────┼────────────────┬────────────────┼───────────────────┤
  72 │ producer_id      u64│ producer_epoch │ reserved    u32│ sequence       u64│
     └─────────────────────┴────────────────┴────────────────┴───────────────────┘
  96   body: length - 96 bytes                                      little-endian

    header_crc = CRC-32C of bytes [8, 96), body_crc among them; body_crc = CRC-32C of the body.
    The producer fills in all fields but base_offset, position and appended_at_ms, which the broker
    stamps.

Invariants
    Reading a record returns it as it was written, or IncompleteRecord (the write was cut off), or
    InvalidRecord (the bytes are damaged).
    Every bit is covered by a checksum: header_crc covers the header and body_crc, and body_crc
    covers the body.
    body_crc is the producer's and never changes: the broker stamps only the header.

With two checksums, stamping an offset costs a CRC of 88 bytes instead of the whole batch. Kafka
keeps its offset outside the CRC instead. `position` detects blocks that were written or copied to a
wrong position.
"""

from __future__ import annotations

import enum
import struct
from dataclasses import dataclass

import crc32c
import msgspec

from .errors import MessageTooLargeError
from .limits import BATCH_BYTES_MAX

MAGIC = 0x314C4B42
HEADER_BYTES = 96
VERSION = 1
COMPRESSION_AT = 14
"""The index of the header's compression byte."""
_LAYOUT = struct.Struct("<IIIBBBBIIQQQqqqQIIQ")
_AFTER_CRC = struct.Struct("<IBBBBIIQQQqqqQIIQ")
_BEFORE = struct.Struct("<II")
_HEAD = struct.Struct("<III")
_STAMP = struct.Struct("<QQ")
_STAMP_AT = 32
_STAMP_TIME = struct.Struct("<q")
_STAMP_TIME_AT = 64
_SENT = struct.Struct("<I8xQ16xq")
_SENT_AT = 20
_U32 = struct.Struct("<I")
RECORD_BYTES_MAX = BATCH_BYTES_MAX
assert _LAYOUT.size == HEADER_BYTES


class Kind(enum.IntEnum):
    """The kind of a record. The meaning of a number never changes."""

    MESSAGES = 1
    PARTITION = 2
    """The broker hosts the partition; body = msgpack of its metadata."""
    SEAL = 3
    """The partition accepts no more appends; base_offset = its end."""
    FENCE = 4
    """The fence of a consumer group on the partition has risen."""
    CURSOR = 5
    """A consumer group's cursor and acked ranges on the partition."""
    STATE = 6
    """The partition's whole state except its messages. It is written before retention removes
    earlier records of the partition.
    """
    TOLD = 7
    """The metaserver has reported all consumer groups of the partition's subject. Earlier records
    in the log contain them.
    """
    FORGET = 8
    """A consumer group was deleted. The partition keeps no progress of the group, and refuses its
    tokens.
    """
    DROPPED = 9
    """Partitions were dropped together with their subject. The broker will never host them
    again.
    """
    PARKED = 10
    """Changes to the messages that a consumer group has parked on the partition."""
    HOLD = 11
    """A job has set or ended a hold, which protects messages of the partition from retention."""
    SCHEDULED = 14
    """Changes to the scheduled messages of the broker; 12 and 13 are reserved. `partition_id` is
    0.
    """


FLAG_NUMBERED = 1
"""A flag of a batch whose `sequence` numbers the rows of a source, and whose `producer_epoch` is a
digest of all rows up to the end of the batch; see `broker/partition/appends.py`.
"""


class Compression(enum.IntEnum):
    """The compression of the keys, values and properties in a batch. The meaning of a number never
    changes.
    """

    NONE = 0
    ZSTD = 1
    LZ4 = 2


class Header(msgspec.Struct, frozen=True, gc=False):
    """The fields of a record's header, in the order of the layout."""

    length: int
    kind: int
    compression: int
    flags: int
    body_crc: int
    count: int
    partition_id: int
    base_offset: int
    position: int
    first_sent_at_ns: int
    last_sent_at_ns: int
    appended_at_ms: int
    producer_id: int
    producer_epoch: int
    sequence: int

    @property
    def next_offset(self) -> int:
        """The offset that follows the last message of the batch."""
        return self.base_offset + self.count


@dataclass(frozen=True, slots=True)
class IncompleteRecord:
    """The data ends before the record does. `wanted` is the length of the record or, if the header
    is cut off, the length of a header.
    """

    wanted: int


@dataclass(frozen=True, slots=True)
class InvalidRecord:
    """The bytes are not a record. `reason` names the wrong field."""

    reason: str


def encode_record(
    body: bytes,
    *,
    kind: int,
    count: int = 0,
    compression: int = Compression.NONE,
    partition_id: int = 0,
    base_offset: int = 0,
    position: int = 0,
    first_sent_at_ns: int = 0,
    last_sent_at_ns: int = 0,
    appended_at_ms: int = 0,
    producer_id: int = 0,
    producer_epoch: int = 0,
    sequence: int = 0,
    flags: int = 0,
) -> bytes:
    """
    Return a header and a body as bytes, with both checksums.

    Raises:
        MessageTooLargeError: the record exceeds RECORD_BYTES_MAX, so readers would refuse it.
    """
    header = encode_header(
        HEADER_BYTES + len(body),
        crc32c.crc32c(body),
        kind=kind,
        count=count,
        compression=compression,
        partition_id=partition_id,
        base_offset=base_offset,
        position=position,
        first_sent_at_ns=first_sent_at_ns,
        last_sent_at_ns=last_sent_at_ns,
        appended_at_ms=appended_at_ms,
        producer_id=producer_id,
        producer_epoch=producer_epoch,
        sequence=sequence,
        flags=flags,
    )
    return header + body


def encode_header(
    length: int,
    body_crc: int,
    *,
    kind: int,
    count: int = 0,
    compression: int = Compression.NONE,
    partition_id: int = 0,
    base_offset: int = 0,
    position: int = 0,
    first_sent_at_ns: int = 0,
    last_sent_at_ns: int = 0,
    appended_at_ms: int = 0,
    producer_id: int = 0,
    producer_epoch: int = 0,
    sequence: int = 0,
    flags: int = 0,
) -> bytes:
    """
    Return the header of a record of `length` bytes, including the header.

    Raises:
        MessageTooLargeError: the record exceeds RECORD_BYTES_MAX, so readers would refuse it.
    """
    if length > RECORD_BYTES_MAX:
        raise MessageTooLargeError(
            f"a record of {length} bytes", size_bytes=length, limit_bytes=RECORD_BYTES_MAX
        )
    checked_fields = _AFTER_CRC.pack(
        length,
        VERSION,
        kind,
        compression,
        flags,
        body_crc,
        count,
        partition_id,
        base_offset,
        position,
        first_sent_at_ns,
        last_sent_at_ns,
        appended_at_ms,
        producer_id,
        producer_epoch,
        0,
        sequence,
    )
    return _BEFORE.pack(MAGIC, crc32c.crc32c(checked_fields)) + checked_fields


def read_header(
    data: bytes | memoryview, start: int = 0
) -> Header | IncompleteRecord | InvalidRecord:
    """Read and check the header at `start` without checking the body."""
    available = len(data) - start
    if available < HEADER_BYTES:
        if available >= 4 and _U32.unpack_from(data, start)[0] != MAGIC:
            return InvalidRecord("no magic")
        return IncompleteRecord(HEADER_BYTES)
    fields = _LAYOUT.unpack_from(data, start)
    magic, header_crc, length, version = fields[:4]
    if magic != MAGIC:
        return InvalidRecord("no magic")
    if crc32c.crc32c(memoryview(data)[start + 8 : start + HEADER_BYTES]) != header_crc:
        return InvalidRecord("header checksum")
    if version != VERSION:
        return InvalidRecord(f"version {version}")
    if not HEADER_BYTES <= length <= RECORD_BYTES_MAX:
        return InvalidRecord(f"length {length}")
    if fields[17]:
        return InvalidRecord("reserved field")
    return Header(*fields[2:3], *fields[4:17], *fields[18:])


def read_record(
    data: bytes | memoryview, start: int = 0
) -> Header | IncompleteRecord | InvalidRecord:
    """Read the record at `start`, and verify both checksums."""
    header = read_header(data, start)
    if not isinstance(header, Header):
        return header
    if len(data) - start < header.length:
        return IncompleteRecord(header.length)
    body = memoryview(data)[start + HEADER_BYTES : start + header.length]
    if crc32c.crc32c(body) != header.body_crc:
        return InvalidRecord("body checksum")
    return header


def is_batch(
    data: bytes,
    start: int,
    *,
    length: int,
    count: int,
    partition_id: int,
    base_offset: int,
    position: int,
) -> bool:
    """Return True if an undamaged batch with these fields is at `start`. This is faster than
    `read_record`, because it does not create a Header.
    """
    if not 0 <= start <= len(data) - length or length < HEADER_BYTES:
        return False
    fields = _LAYOUT.unpack_from(data, start)
    view = memoryview(data)
    return (
        fields[0] == MAGIC
        and fields[2:5] == (length, VERSION, Kind.MESSAGES)
        and fields[8:11] == (count, partition_id, base_offset)
        and fields[11] == position
        and crc32c.crc32c(view[start + 8 : start + HEADER_BYTES]) == fields[1]
        and crc32c.crc32c(view[start + HEADER_BYTES : start + length]) == fields[7]
    )


def last_sent(batch: bytes | bytearray | memoryview) -> tuple[int, int]:
    """Return the offset of the last message of a stored batch, and the time at which it was sent,
    by its producer's clock, in nanoseconds since 1970. The header is not checked.
    """
    count, base_offset, sent_at_ns = _SENT.unpack_from(batch, _SENT_AT)
    return base_offset + count - 1, sent_at_ns


def stamp_record(
    record: bytearray, *, base_offset: int, position: int, appended_at_ms: int
) -> None:
    """Write the broker's fields into the header of `record`, and update the header's checksum."""
    _STAMP.pack_into(record, _STAMP_AT, base_offset, position)
    _STAMP_TIME.pack_into(record, _STAMP_TIME_AT, appended_at_ms)
    _U32.pack_into(record, 4, crc32c.crc32c(memoryview(record)[8:HEADER_BYTES]))
