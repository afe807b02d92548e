"""Encodes the records of the journal of scheduled messages, and the frames in which they are
written. Pure.

    ┌───────┬────────────┬────────┬──────────┬────────────┬─────────────┬──────────────────────────┐
    │ magic │ header_crc │ length │ body_crc │ segment u64│ position u64│ body: msgpack of records │
    └───────┴────────────┴────────┴──────────┴────────────┴─────────────┴──────────────────────────┘
     0       4            8        12         16           24            32            little-endian

    header_crc = CRC-32C of bytes [8, 32); body_crc = CRC-32C of the body; length = header and body
    segment, position: the position of the frame, so that a copy in another place is not valid
    the last byte of the magic is the format: 2 if the frame has a ScheduledForSubject or a
    DroppedMessages, otherwise 1

A frame is written and synced as a whole, so its records become durable together or not at all.
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
"""The maximum size of a record without its subject, value and properties, in bytes."""
ID_BYTES = 18
"""The encoded size of a message id in a record, in bytes."""
_HEADER = struct.Struct("<4sIIIQQ")
_AFTER_CRC = struct.Struct("<IIQQ")


def overhead_of(subject: str) -> int:
    """Return the approximate size of a record without its value and properties, in bytes."""
    return RECORD_OVERHEAD + len(subject)


class ScheduledMessageRecord(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """A record: a message waits for its delivery time."""

    scheduled_id: bytes
    deliver_at_ms: int
    subject: str
    sent_at_ns: int
    value: bytes
    packed_properties: bytes

    @property
    def size(self) -> int:
        """The approximate size in the journal, in bytes."""
        return overhead_of(self.subject) + len(self.value) + len(self.packed_properties)


class ScheduledForSubject(ScheduledMessageRecord, frozen=True, array_like=True, tag=5):
    """A message for the subject with this id. A later subject with the same name does not receive
    it.
    """

    subject_id: int


def bind_to_subject(record: ScheduledMessageRecord, subject_id: int) -> ScheduledMessageRecord:
    """Return the record, bound to the subject with this id; 0 means that the id is unknown."""
    if not subject_id:
        return record
    return ScheduledForSubject(
        scheduled_id=record.scheduled_id,
        deliver_at_ms=record.deliver_at_ms,
        subject=record.subject,
        sent_at_ns=record.sent_at_ns,
        value=record.value,
        packed_properties=record.packed_properties,
        subject_id=subject_id,
    )


class Canceled(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """A record: a waiting message was canceled and will never be delivered."""

    scheduled_id: bytes


class Taken(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """
    A record: messages are about to be stored in their subject, in this order, as one batch.

    The batch is sent to the partition that has the logical partition, with the idempotency key
    `delivery`. After a crash the same batch is sent again, and the partition answers that it
    already has it.
    """

    delivery: str
    subject: str
    logical_partition: int
    scheduled_ids: tuple[bytes, ...]


class Delivered(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """
    A record: the messages of a delivery are stored in their subject.

    It lists the messages, because the `Taken` record may be removed before theirs.
    """

    delivery: str
    scheduled_ids: tuple[bytes, ...]


class DroppedMessages(msgspec.Struct, frozen=True, array_like=True, tag=6):
    """A record: messages will never be delivered, because their subject was deleted or they are too
    large for it.
    """

    scheduled_ids: tuple[bytes, ...]


Record = (
    ScheduledMessageRecord | Canceled | Taken | Delivered | ScheduledForSubject | DroppedMessages
)


def record_bytes(record: Record) -> int:
    """Return the size of a record in the journal, in bytes: either the maximum or an
    approximation.
    """
    if isinstance(record, ScheduledMessageRecord):
        return record.size
    if isinstance(record, Canceled):
        return RECORD_OVERHEAD
    return RECORD_OVERHEAD + ID_BYTES * len(record.scheduled_ids)


_IN_FORMAT_2 = (ScheduledForSubject, DroppedMessages)
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(list[Record]).decode


class Place(NamedTuple):
    """The position of a frame in the journal."""

    segment: int
    position: int
    length: int


class ScanResult(NamedTuple):
    """The result of scanning a segment. `end` is the end of its last valid frame."""

    end: int
    problem: str
    """Why the bytes at `end` are damage rather than an unfinished write; "" if they are not
    damage.
    """
    newer: bool = False
    """True if a frame with a newer format begins at `end`."""


def encode_frame(records: Sequence[Record], *, segment: int, position: int) -> bytes:
    """
    Encode records as a frame at this position of the journal.

    Raises:
        ValueError: the frame exceeds FRAME_BYTES_MAX, so it would be treated as an unfinished write
            at the next start.
    """
    body = _encode(records)
    if HEADER_BYTES + len(body) > FRAME_BYTES_MAX:
        raise ValueError(f"a frame of {len(body)} bytes in the journal of scheduled messages")
    magic = MAGIC_2 if any(isinstance(each, _IN_FORMAT_2) for each in records) else MAGIC
    checked_bytes = _AFTER_CRC.pack(
        HEADER_BYTES + len(body), crc32c.crc32c(body), segment, position
    )
    return b"".join(
        (magic, crc32c.crc32c(checked_bytes).to_bytes(4, "little"), checked_bytes, body)
    )


def read_frame(
    data: bytes | memoryview, start: int, *, segment: int, position: int
) -> tuple[int, list[Record]] | None:
    """Return the length and the records of the frame at `start`, or None if there is no valid frame
    for this position.
    """
    if len(data) - start < HEADER_BYTES:
        return None
    magic, header_crc, length, body_crc, frame_segment, frame_position = _HEADER.unpack_from(
        data, start
    )
    view = memoryview(data)
    if (
        magic not in {MAGIC, MAGIC_2}
        or (frame_segment, frame_position) != (segment, position)
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


def scan(data: bytes, segment: int, on_frame: Callable[[Place, list[Record]], None]) -> ScanResult:
    """
    Call `on_frame` with each frame of a segment, in order, up to the first invalid bytes.

    The invalid bytes are an unfinished write if no valid frame follows them, because a frame is
    written only after the previous one is durable. Otherwise they are damage.
    """
    position = 0
    while position < len(data):
        frame = read_frame(data, position, segment=segment, position=position)
        if frame is None:
            break
        length, records = frame
        on_frame(Place(segment, position, length), records)
        position += length
    magic = data[position : position + 4]
    is_newer = (
        len(magic) == 4 and magic[:3] == MAGIC[:3] and magic[3:].isdigit() and magic > MAGIC_2
    )
    return ScanResult(position, _find_damage(data, position, segment), is_newer)


def _find_damage(data: bytes, end: int, segment: int) -> str:
    """Return a description of the damage if a valid frame follows `end`, otherwise ""."""
    position = data.find(MAGIC[:3], end + 1)
    while position >= 0:
        if read_frame(data, position, segment=segment, position=position) is not None:
            return f"bytes {end} to {position} are damaged"
        position = data.find(MAGIC[:3], position + 1)
    return ""
