"""Encodes the changes to scheduled messages as records of the commit log, whose bodies are msgpack
arrays of changes. Pure.

    SCHEDULED  [[1, id, deliver_at_ms, subject, …], [2, id], …]        see docs/FORMATS.md

A record becomes durable as a whole. Changes that must become durable together and do not fit into
one record are written as several records of one commit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from ...protocol.errors import CorruptLogError
from ...protocol.record import (
    HEADER_BYTES,
    RECORD_BYTES_MAX,
    Header,
    Kind,
    encode_record,
    read_record,
)

BODY_BYTES_MAX = RECORD_BYTES_MAX - HEADER_BYTES
RECORD_OVERHEAD = 96
"""The maximum size of a record without its subject, value and properties, in bytes."""
ID_BYTES = 18
"""The encoded size of a message id in a record, in bytes."""


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
        """The approximate size in the log, in bytes."""
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

    @property
    def size(self) -> int:
        """The maximum size in the log, in bytes."""
        return RECORD_OVERHEAD


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

    @property
    def size(self) -> int:
        """The maximum size in the log without the subject, in bytes."""
        return RECORD_OVERHEAD + ID_BYTES * len(self.scheduled_ids)


class Delivered(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """
    A record: the messages of a delivery are stored in their subject.

    It lists the messages, because the `Taken` record may be removed before theirs.
    """

    delivery: str
    scheduled_ids: tuple[bytes, ...]

    @property
    def size(self) -> int:
        """The maximum size in the log, in bytes."""
        return RECORD_OVERHEAD + ID_BYTES * len(self.scheduled_ids)


class DroppedMessages(msgspec.Struct, frozen=True, array_like=True, tag=6):
    """A record: messages will never be delivered, because their subject was deleted or they are too
    large for it.
    """

    scheduled_ids: tuple[bytes, ...]

    @property
    def size(self) -> int:
        """The maximum size in the log, in bytes."""
        return RECORD_OVERHEAD + ID_BYTES * len(self.scheduled_ids)


Record = (
    ScheduledMessageRecord | Canceled | Taken | Delivered | ScheduledForSubject | DroppedMessages
)


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(list[Record]).decode


class Place(NamedTuple):
    """Where a record is in the commit log."""

    position: int
    length: int


class LogRecord(NamedTuple):
    """An unstamped record of the log, and the changes in it."""

    data: bytes
    changes: Sequence[Record]


def encode_records(changes: Sequence[Record]) -> list[LogRecord]:
    """Encode changes as records of the log: one, unless they are too large for it."""
    body = _encode(changes)
    if len(body) > BODY_BYTES_MAX and len(changes) > 1:
        middle = len(changes) // 2
        return [*encode_records(changes[:middle]), *encode_records(changes[middle:])]
    return [LogRecord(encode_record(body, kind=Kind.SCHEDULED, partition_id=0), changes)]


def decode_changes(body: bytes | memoryview, position: int) -> list[Record]:
    """
    Decode the body of a SCHEDULED record at this position of the log.

    Raises:
        CorruptLogError: the body is not valid, for example because a newer broker wrote it.
    """
    try:
        return _decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise CorruptLogError(
            f"the scheduled messages at position {position} cannot be decoded: {error}",
            position=position,
        ) from error


def read_changes(data: bytes, place: Place) -> list[Record]:
    """
    Decode the bytes of the log at `place`.

    Raises:
        CorruptLogError: the bytes are damaged.
    """
    header = read_record(data)
    if (
        not isinstance(header, Header)
        or header.kind != Kind.SCHEDULED
        or (header.position, header.length) != place
    ):
        raise CorruptLogError(
            f"the scheduled messages at position {place.position} are damaged",
            position=place.position,
        )
    return decode_changes(memoryview(data)[HEADER_BYTES : header.length], place.position)
