"""Encodes and decodes the bodies of log records other than messages: partition facts, fences,
cursors and others. Pure.

    PARTITION  {subject, partition}                 map, so that facts can be added
    FENCE      [group, token, session, promise_ms]
               promise_ms: omitted if there is no promise
    CURSOR     [group, token, cursor, [[start, end], …], removed_unread, [[offset, tries], …],
                [[offset, crashes], …]]
               token: the fence at the time of writing; the last three fields are omitted if they
                   have their defaults
    FORGET     [group, token]
    PARKED     [group, token, at_ms, [change, …], [[tries, source, offset, retry_at_ms], …]]
               changes: see protocol/parked/changes.py; the last field has the times of next tries,
                   and is omitted if it is empty
    HOLD       [job, from_offset, ttl_ms]           ttl_ms 0: the hold has ended
    DROPPED    [[[first id, one past the last id], …], {subject: highest partition id}]
    SEAL       empty; base_offset is the partition's end
    TOLD       empty

Every body is msgpack; a field added later comes last and has a default.
"""

from __future__ import annotations

from typing import Any

import msgspec

from ...protocol.control import HostPartition
from ...protocol.errors import CorruptLogError
from ...protocol.parked import ParkChange
from ...protocol.record import Header, Kind, encode_record

_encode = msgspec.msgpack.Encoder().encode


class FenceBody(msgspec.Struct, frozen=True, array_like=True):
    """A record body: the fence of a consumer group on a partition has risen to `token`, or its
    owner gets a promise.
    """

    group: str
    token: int
    session: str
    promise_ms: int = 0
    """How long no higher token is let in, in milliseconds."""


class CursorBody(msgspec.Struct, frozen=True, array_like=True):
    """The progress of a consumer group on a partition."""

    group: str
    token: int
    cursor: int
    ranges: list[tuple[int, int]]
    removed_unread: int = 0
    """The number of messages that retention removed before the group acked them."""
    attempts: list[tuple[int, int]] = []
    """The offsets of unacked messages, with their numbers of failed tries."""
    begun: list[tuple[int, int]] = []
    """The offsets of suspects whose handling was begun and not finished, with their numbers of
    crashes.
    """


class ParkedBody(msgspec.Struct, frozen=True, array_like=True):
    """Changes to the messages that a consumer group has parked on a partition."""

    group: str
    token: int
    at_ms: int
    """When the changes were made, by the broker's wall clock, in milliseconds since 1970."""
    changes: tuple[ParkChange, ...]
    next_tries: tuple[tuple[int, int, int, int], ...] = ()
    """The retry times after the changes: number of tries, source, offset, milliseconds since
    1970.
    """


class ForgetBody(msgspec.Struct, frozen=True, array_like=True):
    """A record body: a consumer group was deleted. Its tokens up to and including `token` are
    refused.
    """

    group: str
    token: int


class HoldBody(msgspec.Struct, frozen=True, array_like=True, order=True):
    """A record body: a job protects the messages from `from_offset` on against retention for
    `ttl_ms`, where 0 means that the hold has ended.
    """

    job: str
    from_offset: int
    ttl_ms: int


class DroppedBody(msgspec.Struct, frozen=True, array_like=True):
    """Partitions that were dropped with their subjects."""

    ranges: list[tuple[int, int]]
    """Half-open ranges of partition ids."""
    subjects: dict[str, int]
    """Maps the name of each deleted subject to its highest partition id."""


Body = (
    HostPartition | FenceBody | CursorBody | ForgetBody | DroppedBody | ParkedBody | HoldBody | None
)

_DECODERS: dict[Kind, msgspec.msgpack.Decoder[Any]] = {
    Kind.PARTITION: msgspec.msgpack.Decoder(HostPartition),
    Kind.FENCE: msgspec.msgpack.Decoder(FenceBody),
    Kind.CURSOR: msgspec.msgpack.Decoder(CursorBody),
    Kind.FORGET: msgspec.msgpack.Decoder(ForgetBody),
    Kind.DROPPED: msgspec.msgpack.Decoder(DroppedBody),
    Kind.PARKED: msgspec.msgpack.Decoder(ParkedBody),
    Kind.HOLD: msgspec.msgpack.Decoder(HoldBody),
}
WITHOUT_BODY = frozenset({Kind.SEAL, Kind.TOLD})
_KINDS = {
    HostPartition: Kind.PARTITION,
    FenceBody: Kind.FENCE,
    CursorBody: Kind.CURSOR,
    ForgetBody: Kind.FORGET,
    DroppedBody: Kind.DROPPED,
    ParkedBody: Kind.PARKED,
    HoldBody: Kind.HOLD,
}


def encode_body(partition_id: int, body: Body) -> bytes:
    """Encode an unstamped log record. None is encoded as a SEAL."""
    if body is None:
        return encode_record(b"", kind=Kind.SEAL, partition_id=partition_id)
    fields: Any = body
    if isinstance(body, HostPartition):
        fields = msgspec.to_builtins(body)
        del fields["partition"]["logic_start"]  # brokers do not store it
    elif isinstance(body, CursorBody) and not body.begun:
        fields = (body.group, body.token, body.cursor, body.ranges)
        if body.attempts:
            fields += (body.removed_unread, body.attempts)
        elif body.removed_unread:
            fields += (body.removed_unread,)
    elif isinstance(body, FenceBody) and not body.promise_ms:
        fields = (body.group, body.token, body.session)
    elif isinstance(body, ParkedBody) and not body.next_tries:
        fields = (body.group, body.token, body.at_ms, body.changes)
    return encode_record(_encode(fields), kind=_KINDS[type(body)], partition_id=partition_id)


def encode_told(partition_id: int) -> bytes:
    """Encode an unstamped TOLD record. It states that the log, up to this record, has all groups of
    the subject for the partition.
    """
    return encode_record(b"", kind=Kind.TOLD, partition_id=partition_id)


def decode_body(header: Header, body: memoryview) -> Body:
    """
    Decode the body of a record other than MESSAGES.

    Raises:
        CorruptLogError: the kind is unknown, or the body is not valid for it, for example because a
            newer broker wrote the log.
    """
    if header.kind in WITHOUT_BODY:
        return None
    try:
        decoded: Body = _DECODERS[Kind(header.kind)].decode(body)
    except (ValueError, KeyError, msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise CorruptLogError(
            f"record of kind {header.kind} at position {header.position}: {error}",
            position=header.position,
        ) from error
    return decoded
