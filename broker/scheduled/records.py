"""Records of the journal of scheduled messages, and the frames that they are written in.  Pure.

    ┌───────┬────────────┬────────┬──────────┬────────────┬─────────────┬───────────────────────────┐
    │ magic │ header_crc │ length │ body_crc │ segment u64│ position u64│ body: msgpack of records  │   little-endian
    └───────┴────────────┴────────┴──────────┴────────────┴─────────────┴───────────────────────────┘
     0       4            8        12         16           24            32

    header_crc = CRC-32C of bytes [8, 32); body_crc = CRC-32C of the body; length = header and body
    segment, position: where the frame is, so that bytes at another place are no frame
    the last byte of the magic is the digit of the format: 2 if a record in the frame is a
    WaitsForSubject or a DroppedMessages, else 1

A frame is what one write and one sync made durable, so its records are durable together or not at
all.
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
"""Bytes of a record besides its subject, value and properties, at most."""
ID_BYTES = 18
"""Bytes of a message's id in a record."""
_HEADER = struct.Struct("<4sIIIQQ")
_AFTER_CRC = struct.Struct("<IIQQ")


def overhead_of(subject: str) -> int:
    """Bytes of a record beside value and properties, about."""
    return RECORD_OVERHEAD + len(subject)


class Waits(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """A message is to be delivered at a time."""

    scheduled_id: bytes
    deliver_at_ms: int
    subject: str
    sent_at_ns: int
    value: bytes
    packed_properties: bytes

    @property
    def size(self) -> int:
        """Bytes in the journal, about."""
        return overhead_of(self.subject) + len(self.value) + len(self.packed_properties)


class WaitsForSubject(Waits, frozen=True, array_like=True, tag=5):
    """The same for one subject alone: a later subject of the name does not get the message."""

    subject_id: int


def waits_for(record: Waits, subject_id: int) -> Waits:
    """The record for the subject of this id; 0: it is not known."""
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
    """A waiting message is never delivered."""

    scheduled_id: bytes


class Taken(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """
    Messages are about to be stored in their subject, in this order, as one batch.

    The batch goes to the partition of the logical partition `logical`, under the idempotency key
    `delivery`.  After a crash the same batch is stored again, and the partition tells that it has
    it.
    """

    delivery: str
    subject: str
    logical: int
    scheduled_ids: tuple[bytes, ...]


class Delivered(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """
    The messages of a delivery are stored in their subject.

    It names them, because the record of the delivery may be removed before those of the messages.
    """

    delivery: str
    scheduled_ids: tuple[bytes, ...]


class DroppedMessages(msgspec.Struct, frozen=True, array_like=True, tag=6):
    """Messages are never delivered, because their subject never takes them: it was deleted, or they
    are too large for it.
    """

    scheduled_ids: tuple[bytes, ...]


Record = Waits | Canceled | Taken | Delivered | WaitsForSubject | DroppedMessages


def size_of(record: Record) -> int:
    """Bytes of a record in the journal, at most, or about."""
    if isinstance(record, Waits):
        return record.size
    if isinstance(record, Canceled):
        return RECORD_OVERHEAD
    return RECORD_OVERHEAD + ID_BYTES * len(record.scheduled_ids)


_IN_FORMAT_2 = (WaitsForSubject, DroppedMessages)
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(list[Record]).decode


class Place(NamedTuple):
    """Where a frame is in the journal."""

    segment: int
    position: int
    length: int


class Scanned(NamedTuple):
    """What is in a segment: `end` is the end of its last whole frame."""

    end: int
    problem: str
    """Why the bytes at `end` are damage, and no write that was cut; "" if they are none."""
    newer: bool = False
    """The bytes at `end` are a frame of a newer format."""


def encode_frame(records: Sequence[Record], *, segment: int, position: int) -> bytes:
    """
    Records as a frame of the journal at this place.

    Raises:
        ValueError: they are more than FRAME_BYTES_MAX, which a start would take for a write that
            was cut.
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
    """The length and the records of the frame at `start`; None if there is no whole frame of this
    place.
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
    Call `visit` with each frame of a segment, in order, up to the first bytes that are no frame.

    They are a write that was cut if no whole frame follows them, because a frame is written when
    the frame before it is durable.  Else they are damage.
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
