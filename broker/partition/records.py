"""Encodes and decodes the bodies of records that are not messages: facts of partitions, fences,
cursors and others. Pure.

    PARTITION  {subject, partition}                 map, so that facts can be added
    FENCE      [group, token, session]
    CURSOR     [group, token, cursor, [[start, end], …], removed_unread, [[offset, tries], …],
                [[offset, crashes], …]]
               token: the fence when it was written; the last three fields are written only if they
                   are not 0 and empty
    FORGET     [group, token]
    PARKED     [group, token, at_ms, [change, …], [[tries, source, offset, next_ms], …]]
               changes as in protocol/parked/changes.py; the last field, which says when messages
                   are tried again, is written only if it is not empty
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
    """A record body: the fence of a consumer group on a partition rose to `token`."""

    group: str
    token: int
    session: str


class CursorBody(msgspec.Struct, frozen=True, array_like=True):
    """The progress of a consumer group on a partition."""

    group: str
    token: int
    cursor: int
    ranges: list[tuple[int, int]]
    removed_unread: int = 0
    """The number of messages that retention removed before the group had acked them."""
    attempts: list[tuple[int, int]] = []
    """(offset, number of failed tries) of messages that are not acked."""
    begun: list[tuple[int, int]] = []
    """(offset, crashes) of suspects that were begun and have not ended."""


class ParkedBody(msgspec.Struct, frozen=True, array_like=True):
    """Changes of the messages that a consumer group has parked on a partition."""

    group: str
    token: int
    at_ms: int
    """The time of the changes in milliseconds, by the broker's calendar."""
    changes: tuple[ParkChange, ...]
    next_tries: tuple[tuple[int, int, int, int], ...] = ()
    """(number of tries, source, offset, milliseconds since 1970): the times at which messages that
    wait for retry after the changes are tried.
    """


class ForgetBody(msgspec.Struct, frozen=True, array_like=True):
    """A record body: a consumer group was deleted, and its tokens up to and including `token` are
    refused.
    """

    group: str
    token: int


class HoldBody(msgspec.Struct, frozen=True, array_like=True, order=True):
    """A record body: a job holds the messages from `from_offset` on against retention, for
    `ttl_ms`. If that is 0, the hold has ended.
    """

    job: str
    from_offset: int
    ttl_ms: int


class DroppedBody(msgspec.Struct, frozen=True, array_like=True):
    """Partitions that were dropped with their subjects."""

    ranges: list[tuple[int, int]]
    """Half-open ranges of partition ids."""
    subjects: dict[str, int]
    """Name of a deleted subject → its highest partition id."""


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
    """Return a record of the log that is not stamped yet. None makes a SEAL."""
    if body is None:
        return encode_record(b"", kind=Kind.SEAL, partition_id=partition_id)
    said: Any = body
    if isinstance(body, HostPartition):
        said = msgspec.to_builtins(body)
        del said["partition"]["logic_start"]  # brokers do not store it
    elif isinstance(body, CursorBody) and not body.begun:
        said = (body.group, body.token, body.cursor, body.ranges)
        if body.attempts:
            said += (body.removed_unread, body.attempts)
        elif body.removed_unread:
            said += (body.removed_unread,)
    elif isinstance(body, ParkedBody) and not body.next_tries:
        said = (body.group, body.token, body.at_ms, body.changes)
    return encode_record(_encode(said), kind=_KINDS[type(body)], partition_id=partition_id)


def encode_told(partition_id: int) -> bytes:
    """Return a TOLD record that is not stamped yet. It says that the partition's groups earlier in
    the log are all groups of its subject.
    """
    return encode_record(b"", kind=Kind.TOLD, partition_id=partition_id)


def decode_body(header: Header, body: memoryview) -> Body:
    """
    Return the body of a record that is not MESSAGES.

    Raises:
        CorruptLogError: the kind is unknown or the body does not fit it, for example in a log that
            a newer broker wrote.
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
