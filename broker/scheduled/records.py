"""Records of the journal of scheduled messages, and the frames in which they are written. Pure.

    ┌───────┬────────────┬────────┬──────────┬────────────┬─────────────┬──────────────────────────┐
    │ magic │ header_crc │ length │ body_crc │ segment u64│ position u64│ body: msgpack of records │
    └───────┴────────────┴────────┴──────────┴────────────┴─────────────┴──────────────────────────┘
     0       4            8        12         16           24            32            little-endian

    header_crc = CRC-32C of bytes [8, 32); body_crc = CRC-32C of the body; length = header and body
    segment, position: where the frame is, so that bytes at another place are no frame
    the last byte of the magic is the digit of the format: 2 if a record in the frame is a
    WaitsForSubject or a DroppedMessages, else 1

A frame contains what one write and one sync made durable, so its records are durable together or
not at all.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import NamedTuple

import crc32c
import msgspec

MAGIC = b"KLS1"
MAGIC_2 = b"KLS2"
HEADER_BYTES = 32
FRAME_BYTES_MAX = 16 << 20
RECORD_OVERHEAD = 96
"""The most bytes of a record besides its subject, value and properties."""
ID_BYTES = 18
"""The number of bytes of a message's id in a record."""
_HEADER = struct.Struct("<4sIIIQQ")
_AFTER_CRC = struct.Struct("<IIQQ")


def overhead_of(subject: str) -> int:
    """Return the approximate number of bytes of a record besides value and properties."""
    return RECORD_OVERHEAD + len(subject)


class Waits(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """A record: a message is to be delivered at a time."""

    scheduled_id: bytes
    deliver_at_ms: int
    subject: str
    sent_at_ns: int
    value: bytes
    packed_properties: bytes

    @property
    def size(self) -> int:
        """The approximate number of bytes in the journal."""
        return overhead_of(self.subject) + len(self.value) + len(self.packed_properties)


class WaitsForSubject(Waits, frozen=True, array_like=True, tag=5):
    """A `Waits` for one subject only: a later subject of the same name does not receive the
    message.
    """

    subject_id: int


def waits_for(record: Waits, subject_id: int) -> Waits:
    """Return the record for the subject with this id; 0 means that the id is not known."""
    if not subject_id:
        return record
    return WaitsForSubject(
        scheduled_id=record.scheduled_id,
        deliver_at_ms=record.deliver_at_ms,
        subject=record.subject,
        sent_at_ns=record.sent_at_ns,
        value=record.value,
        packed_properties=record.packed_properties,
        subject_id=subject_id,
    )


class Canceled(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """A record: a waiting message is never delivered."""

    scheduled_id: bytes


class Taken(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """
    A record: messages are about to be stored in their subject, in this order, as one batch.

    The batch goes to the partition of the logical partition `logical`, under the idempotency key
    `delivery`. After a crash the same batch is stored again, and the partition reports that it
    already has it.
    """

    delivery: str
    subject: str
    logical: int
    scheduled_ids: tuple[bytes, ...]


class Delivered(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """
    A record: the messages of a delivery are stored in their subject.

    It names the messages, because the record of the delivery may be removed before theirs.
    """

    delivery: str
    scheduled_ids: tuple[bytes, ...]


class DroppedMessages(msgspec.Struct, frozen=True, array_like=True, tag=6):
    """A record: messages are never delivered, because their subject never accepts them: it was
    deleted, or they are too large for it.
    """

    scheduled_ids: tuple[bytes, ...]


Record = Waits | Canceled | Taken | Delivered | WaitsForSubject | DroppedMessages


def size_of(record: Record) -> int:
    """Return the greatest or the approximate number of bytes of a record in the journal."""
    if isinstance(record, Waits):
        return record.size
    if isinstance(record, Canceled):
        return RECORD_OVERHEAD
    return RECORD_OVERHEAD + ID_BYTES * len(record.scheduled_ids)


_IN_FORMAT_2 = (WaitsForSubject, DroppedMessages)
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(list[Record]).decode


class Place(NamedTuple):
    """The position of a frame in the journal."""

    segment: int
    position: int
    length: int


class Scanned(NamedTuple):
    """The result of scanning a segment; `end` is the end of its last whole frame."""

    end: int
    problem: str
    """Why the bytes at `end` are damage and not an unfinished write; "" if they are not damage."""
    newer: bool = False
    """True if the bytes at `end` are a frame of a newer format."""


def encode_frame(records: Sequence[Record], *, segment: int, position: int) -> bytes:
    """
    Return records as a frame of the journal at this place.

    Raises:
        ValueError: they take more than FRAME_BYTES_MAX, which a start would treat as an unfinished
            write.
    """
    body = _encode(records)
    if HEADER_BYTES + len(body) > FRAME_BYTES_MAX:
        raise ValueError(f"a frame of {len(body)} bytes in the journal of scheduled messages")
    magic = MAGIC_2 if any(isinstance(each, _IN_FORMAT_2) for each in records) else MAGIC
    after = _AFTER_CRC.pack(HEADER_BYTES + len(body), crc32c.crc32c(body), segment, position)
    return b"".join((magic, crc32c.crc32c(after).to_bytes(4, "little"), after, body))


def read_frame(
    data: bytes | memoryview, start: int, *, segment: int, position: int
) -> tuple[int, list[Record]] | None:
    """Return the length and the records of the frame at `start`, or None if there is no whole frame
    of this place.
    """
    if len(data) - start < HEADER_BYTES:
        return None
    magic, header_crc, length, body_crc, its_segment, its_position = _HEADER.unpack_from(
        data, start
    )
    view = memoryview(data)
    if (
        magic not in {MAGIC, MAGIC_2}
        or (its_segment, its_position) != (segment, position)
        or crc32c.crc32c(view[start + 8 : start + HEADER_BYTES]) != header_crc
        or not HEADER_BYTES <= length <= min(FRAME_BYTES_MAX, len(data) - start)
    ):
        return None
    body = view[start + HEADER_BYTES : start + length]
    if crc32c.crc32c(body) != body_crc:
        return None
    try:
        return length, _decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None


def scan(data: bytes, segment: int, visit: Callable[[Place, list[Record]], None]) -> Scanned:
    """
    Call `visit` with each frame of a segment, in order, up to the first bytes that are not a frame.

    These bytes are an unfinished write if no whole frame follows them, because a frame is written
    only when the previous one is durable. Otherwise they are damage.
    """
    at = 0
    while at < len(data):
        frame = read_frame(data, at, segment=segment, position=at)
        if frame is None:
            break
        length, records = frame
        visit(Place(segment, at, length), records)
        at += length
    rest = data[at : at + 4]
    newer = len(rest) == 4 and rest[:3] == MAGIC[:3] and rest[3:].isdigit() and rest > MAGIC_2
    return Scanned(at, _damage(data, at, segment), newer)


def _damage(data: bytes, end: int, segment: int) -> str:
    after = data.find(MAGIC[:3], end + 1)
    while after >= 0:
        if read_frame(data, after, segment=segment, position=after) is not None:
            return f"bytes {end} to {after} are damaged"
        after = data.find(MAGIC[:3], after + 1)
    return ""
