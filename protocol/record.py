"""The header that every record of the commit log and every batch on the wire begins with.  Pure.

     0        4            8        12   13    14     15     16         20       24
     ┌────────┬────────────┬────────┬────┬─────┬──────┬──────┬──────────┬────────┐
     │ magic  │ header_crc │ length │ver │kind │codec │flags │ body_crc │ count  │
     ├────────┴────────────┼────────┴────┴─────┴──────┴──────┼──────────┴────────┤
  24 │ partition_id     u64│ base_offset                  u64│ position       u64│
     ├─────────────────────┼─────────────────────────────────┼───────────────────┤
  48 │ first_sent_at_ns i64│ last_sent_at_ns              i64│ appended_at_ms i64│
     ├─────────────────────┼────────────────┬────────────────┼───────────────────┤
  72 │ producer_id      u64│ producer_epoch │ reserved    u32│ sequence       u64│
     └─────────────────────┴────────────────┴────────────────┴───────────────────┘
  96   body: length - 96 bytes                                      little-endian

    header_crc = CRC-32C of bytes [8, 96), body_crc among them; body_crc = CRC-32C of the body.
    The producer fills all but base_offset, position and appended_at_ms, which the broker stamps.

Invariants
    A record reads back as what was written, or is told to be Short (the write was cut) or Wrong (the bytes
    were damaged); it never reads back as something else.
    Every bit is under a checksum: the header's, or the body's, which is itself under the header's.
    The body keeps the producer's checksum for ever: the broker stamps the header without touching it.

Source: two checksums so that stamping an offset costs 88 bytes of CRC and not the batch; Kafka keeps its
offset outside the CRC instead.  `position` finds blocks written or copied to a wrong place (misdirected writes).
"""

from __future__ import annotations

import enum
import struct
from dataclasses import dataclass

import crc32c

from .errors import MessageTooLargeError
from .limits import BATCH_BYTES_MAX

MAGIC = 0x314C4B42
HEADER_BYTES = 96
VERSION = 1
_LAYOUT = struct.Struct("<IIIBBBBIIQQQqqqQIIQ")
_AFTER_CRC = struct.Struct("<IBBBBIIQQQqqqQIIQ")
_HEAD = struct.Struct("<III")
_STAMP = struct.Struct("<QQ")
_STAMP_AT = 32
_STAMP_TIME = struct.Struct("<q")
_STAMP_TIME_AT = 64
_U32 = struct.Struct("<I")
RECORD_BYTES_MAX = BATCH_BYTES_MAX
assert _LAYOUT.size == HEADER_BYTES


class Kind(enum.IntEnum):
    """What a record says.  A number is never used again for something else."""

    MESSAGES = 1
    PARTITION = 2
    """The broker hosts this partition: body = msgpack of its facts."""
    SEAL = 3
    """The partition takes no more appends; base_offset = its end."""
    FENCE = 4
    """A consumer group's fencing token on the partition rose."""
    CURSOR = 5
    """A consumer group's cursor and acked ranges on the partition."""
    STATE = 6
    """All of the partition but its messages, written again before the records that said so are removed."""
    TOLD = 7
    """The metaserver has told every consumer group of the partition's subject: those before it in the log are all."""


class Codec(enum.IntEnum):
    """How the body is compressed."""

    NONE = 0


@dataclass(frozen=True, slots=True)
class Header:
    """The fields of a record's header, in the order of the layout."""

    length: int
    kind: int
    codec: int
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
        """One past the last offset of the batch."""
        return self.base_offset + self.count


@dataclass(frozen=True, slots=True)
class Short:
    """The bytes end before the record does; `wanted` is the length it announces, or that of a header."""

    wanted: int


@dataclass(frozen=True, slots=True)
class Wrong:
    """The bytes are not a record; `reason` says what does not fit."""

    reason: str


def encode_record(
    body: bytes,
    *,
    kind: int,
    count: int = 0,
    codec: int = Codec.NONE,
    partition_id: int = 0,
    base_offset: int = 0,
    position: int = 0,
    first_sent_at_ns: int = 0,
    last_sent_at_ns: int = 0,
    appended_at_ms: int = 0,
    producer_id: int = 0,
    producer_epoch: int = 0,
    sequence: int = 0,
) -> bytes:
    """
    Header and body as bytes, checksums filled in.

    Raises:
        MessageTooLargeError: longer than RECORD_BYTES_MAX, so that nobody could read it.
    """
    length = HEADER_BYTES + len(body)
    if length > RECORD_BYTES_MAX:
        raise MessageTooLargeError(
            f"a record of {length} bytes", size_bytes=length, limit_bytes=RECORD_BYTES_MAX
        )
    after = _AFTER_CRC.pack(
        length,
        VERSION,
        kind,
        codec,
        0,
        crc32c.crc32c(body),
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
    return b"".join((struct.pack("<II", MAGIC, crc32c.crc32c(after)), after, body))


def read_header(data: bytes | memoryview, start: int = 0) -> Header | Short | Wrong:
    """Read and check the header at `start`; the body's checksum is not looked at."""
    left = len(data) - start
    if left < HEADER_BYTES:
        if left >= 4 and _U32.unpack_from(data, start)[0] != MAGIC:
            return Wrong("no magic")
        return Short(HEADER_BYTES)
    fields = _LAYOUT.unpack_from(data, start)
    magic, header_crc, length, version = fields[:4]
    if magic != MAGIC:
        return Wrong("no magic")
    if crc32c.crc32c(memoryview(data)[start + 8 : start + HEADER_BYTES]) != header_crc:
        return Wrong("header checksum")
    if version != VERSION:
        return Wrong(f"version {version}")
    if not HEADER_BYTES <= length <= RECORD_BYTES_MAX:
        return Wrong(f"length {length}")
    if fields[17]:
        return Wrong("reserved field")
    return Header(*fields[2:3], *fields[4:17], *fields[18:])


def read_record(data: bytes | memoryview, start: int = 0) -> Header | Short | Wrong:
    """Read the record at `start` and check both checksums."""
    header = read_header(data, start)
    if not isinstance(header, Header):
        return header
    if len(data) - start < header.length:
        return Short(header.length)
    body = memoryview(data)[start + HEADER_BYTES : start + header.length]
    if crc32c.crc32c(body) != header.body_crc:
        return Wrong("body checksum")
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
    """Is the undamaged batch that these say at `start`?  As `read_record`, without making a Header of it."""
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


def stamp(record: bytearray, *, base_offset: int, position: int, appended_at_ms: int) -> None:
    """Write what the broker decides into the first HEADER_BYTES of `record` and renew the header's checksum."""
    _STAMP.pack_into(record, _STAMP_AT, base_offset, position)
    _STAMP_TIME.pack_into(record, _STAMP_TIME_AT, appended_at_ms)
    _U32.pack_into(record, 4, crc32c.crc32c(memoryview(record)[8:HEADER_BYTES]))
