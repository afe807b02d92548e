"""Frames of the data plane: requests and answers on one connection between a client and a broker.
Pure.

    ┌──────────┬──────────────────┬────────────────────────────────────────────────┬─────────┐
    │ size u32 │ header bytes u32 │ header: msgpack array [tag, correlation id, …] │ payload │
    └──────────┴──────────────────┴────────────────────────────────────────────────┴─────────┘

`size` is the number of bytes that follow it; a frame of size 0 is a ping or its reply. The tag and
the fields after the correlation id are those of a struct below. An answer has the correlation id of
its request; answers may arrive in any order. The id 0 is reserved for notices from the broker, such
as the reason why it closes the connection. Durations are in milliseconds. `token` is a fencing
token, `group` a consumer group, `session` a consumer's session.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from functools import partial
from typing import Any, TypeGuard, TypeVar, get_args

import msgspec
from msgspec.structs import astuple

from .errors import (
    Fate,
    FrameError,
    KeylaneError,
    MessageTooLargeError,
    error_from_wire,
    specific_hint,
    wire_details,
    wire_text,
)
from .limits import FRAME_BYTES_MAX
from .parked.views import FailingMessage

SIZE = struct.Struct("<I")
"""The layout of the first field of a frame."""
SIGN_OF_LIFE = bytes(SIZE.size)
HEADER_BYTES_MAX = 1 << 18
_LENGTHS = struct.Struct("<II")
_FATES: dict[str, Fate] = {fate.value: fate for fate in Fate}


class Frame(msgspec.Struct, frozen=True, array_like=True):
    """The base class of all requests and answers."""


# ── requests ──────────────────────────────────────────────────────────────────────────────────────
class Append(Frame, frozen=True, array_like=True, tag=1):
    """Store the batch in the payload. The answer is Appended."""

    partition_id: int


class Acquire(Frame, frozen=True, array_like=True, tag=2):
    """Durably raise the fence to `token`, and take the pull lock. The answer is Acquired."""

    partition_id: int
    group: str
    session: str
    token: int
    ttl_ms: int


class Pull(Frame, frozen=True, array_like=True, tag=3):
    """Fetch batches from `offset` on under the pull lock, and renew the lock. The answer is
    Batches.
    """

    partition_id: int
    group: str
    session: str
    token: int
    offset: int
    bytes_max: int
    wait_ms: int
    """The maximum time that the broker waits for messages, in milliseconds."""
    tags: tuple[str, ...] = ()
    """The tags that the consumer wants; () means no filter. The broker may omit batches in which no
    message has any of them.
    """
    answers_max: int = 1
    """The maximum number of answers. All but the last have `Batches.more`. `bytes_max` and
    `wait_ms` apply to all of them together.
    """


class Ack(Frame, frozen=True, array_like=True, tag=4):
    """Ack the offsets in ranges `[start, end)`. Without ranges, only renew the lock. The answer is
    Acked, once the acks are durable.
    """

    partition_id: int
    group: str
    session: str
    token: int
    ranges: tuple[tuple[int, int], ...]
    failed: tuple[tuple[int, int], ...] = ()
    """The messages that have failed since the last ack, as (offset, number of failed attempts)."""
    failing: FailingMessage | None = None
    """The oldest message that has failed and has not been handled yet; None if there is none."""
    begun: tuple[tuple[int, int], ...] = ()
    """
    The suspects that are passed to a handler once this ack is durable, as (offset, number of
    crashes).

    If the owner dies before it acks them, reports their failure or releases the lock, the next
    owner is informed of them.
    """
    held: tuple[tuple[int, int], ...] = ()
    """In a shared group, the ranges that handlers of this session are still processing. They remain
    in flight for another `in_flight_ms`.
    """
    in_flight_ms: int = 0
    promise_ms: int = 0
    """How long no other owner is to be let in, in milliseconds; 0: no promise is wanted. Only in an
    exclusive group.
    """


class Release(Frame, frozen=True, array_like=True, tag=5):
    """Release the pull lock. The answer is Released."""

    partition_id: int
    group: str
    session: str
    token: int


class Read(Frame, frozen=True, array_like=True, tag=6):
    """Fetch batches from `offset` on, without a group or a lock. The answer is Batches."""

    partition_id: int
    offset: int
    bytes_max: int
    background: bool = False
    """True for reads by a job, which have a lower priority than live clients."""
    wait_ms: int = 0
    """The same as in Pull."""


class AcquireShared(Frame, frozen=True, array_like=True, tag=7):
    """
    Acquire a partition like Acquire, but for a shared group, whose sessions all use the same token.
    The answer is Acquired.

    If the broker receives no frame from a session for `ttl_ms`, it releases the session's messages
    in flight.
    """

    partition_id: int
    group: str
    session: str
    token: int
    ttl_ms: int


class PullShared(Frame, frozen=True, array_like=True, tag=8):
    """
    Fetch messages that are not in flight. The broker redelivers them unless the session acks them
    within `in_flight_ms`. The answer is Handed.

    Ack and Release work as in an exclusive group. Each pull or ack renews the session; an ack also
    renews the messages in `held`. A release returns all messages that the session has in flight.
    """

    partition_id: int
    group: str
    session: str
    token: int
    count_max: int
    bytes_max: int
    wait_ms: int
    in_flight_ms: int


class Schedule(Frame, frozen=True, array_like=True, tag=9):
    """
    Schedule the message in the payload for later delivery. The answer is Scheduled, once the
    message is durable.

    The payload is a batch of one message without a key, with partition id 0. If the request is
    repeated with the same `scheduled_id`, the message is stored once.
    """

    subject: str
    deliver_at_ms: int
    """The wall-clock time of delivery, in milliseconds since 1970."""
    scheduled_id: bytes
    """16 random bytes, drawn by the sender."""


class CancelScheduled(Frame, frozen=True, array_like=True, tag=10):
    """Cancel a scheduled message. The answer is ScheduledCanceled, once this is durable."""

    scheduled_id: bytes


class ChangeParked(Frame, frozen=True, array_like=True, tag=11):
    """
    Change the group's parked messages. The payload is a list of `parked.ParkChange`. The answer is
    ParkedChanged, once the changes are durable.

    The changes are atomic and idempotent.
    """

    partition_id: int
    group: str
    session: str
    token: int
    next_tries: tuple[tuple[int, int, int, int], ...] = ()
    """The retry times of messages, for display: (number of attempts, source, offset, milliseconds
    since 1970).
    """


class ListParked(Frame, frozen=True, array_like=True, tag=12):
    """List the group's parked keys, beginning with key number `first`. The answer is ParkedKeys."""

    partition_id: int
    group: str
    session: str
    token: int
    first: int


class ReadParked(Frame, frozen=True, array_like=True, tag=13):
    """Read the offsets of `count` parked messages of a key, after skipping its first `first`
    ranges. The answer is ParkedRows.
    """

    partition_id: int
    group: str
    session: str
    token: int
    key: bytes | int | None
    count: int
    first: int = 0


class AdoptParked(Frame, frozen=True, array_like=True, tag=14):
    """
    Adopt the parked messages of the group on a drained parent, for keys in the logical partitions
    `[range_start, range_end)`. Answer: ParkedToAdopt.

    The owner of a child sends this, and needs no token for the parent. It freezes the parked
    messages there.
    """

    partition_id: int
    group: str
    range_start: int
    range_end: int
    first_row: int
    """First row of the answer, counted from 0."""


class ReleaseParked(Frame, frozen=True, array_like=True, tag=15):
    """
    Report that a descendant no longer needs the messages that the group had parked on an ancestor.
    Answer: ParkedChanged.

    This covers keys in the logical partitions `[range_start, range_end)`.
    """

    partition_id: int
    group: str
    range_start: int
    range_end: int
    token: int = 0
    """Token of the descendant's owner; 0: unknown. A token below the ancestor's fence is refused,
    because a reset may have been followed by new parked messages.
    """
    includes_loose: bool = False
    """True if it also covers loose and displaced messages, which the descendant has inherited."""


class EditParked(Frame, frozen=True, array_like=True, tag=20):
    """
    Replace the value of a parked message by the payload, on behalf of an operator. The answer is
    ParkedEdited, once this is durable.

    `key` is the key under which the message is parked, or None for dead letters. `source` and
    `offset` identify the original message.
    """

    partition_id: int
    group: str
    key: bytes | None
    source: int
    offset: int
    properties: bytes
    """The properties in their packed form."""


class ReadEdited(Frame, frozen=True, array_like=True, tag=21):
    """Read the value that an operator has stored for a parked message. The fields are those of
    EditParked. The answer is ParkedEdited.
    """

    partition_id: int
    group: str
    key: bytes | int | None
    source: int
    offset: int


class Hello(Frame, frozen=True, array_like=True, tag=24):
    """The first frame of every connection, which states the client's version. The answer is
    Welcome, or a refusal if the versions are incompatible.
    """

    version: str


class Follow(Frame, frozen=True, array_like=True, tag=25):
    """Fetch the log of a broker from `position` on, for a copy of its data folder. The answer is
    Followed.
    """

    broker_group: str
    copy_id: str
    """The random id of the copy."""
    position: int
    """Where the bytes begin that it needs; -1 if it has none yet."""
    bytes_max: int
    wait_ms: int
    """How long the broker waits for bytes beyond `position`, as in Pull."""
    tail_start: int = -1
    """Where the bytes before `position` begin that are to be compared; -1: they were compared
    before with the log of this opening.
    """
    tail_crc: int = 0
    """Their CRC-32C."""
    follower: str = ""
    """A random name of the follower's process."""
    unsynced_bytes: int = 0
    """How many bytes before `position` are not durable at the copy yet, because it is about to
    store an answer.
    """
    takes_over: bool = False
    """True if the copy is complete, and its follower takes the broker's place if it may."""
    has_taken_over: bool = False
    """True if a metaserver has given the copy the broker's place; the copy follows no more."""


class Challenge(Frame, frozen=True, array_like=True, tag=22):
    """Request a challenge, which the holder of a capability must sign on this connection. The
    answer is Challenged.
    """


class Authenticate(Frame, frozen=True, array_like=True, tag=23):
    """
    Authenticate the caller on this connection. Clients repeat this before the capability expires.
    The answer is Authenticated.

    `proof` is the holder's signature over the challenge of this connection and the broker's
    address.
    """

    capability: str
    proof: bytes
    address: str
    """The address that the caller used to connect to the broker."""


# ── answers ───────────────────────────────────────────────────────────────────────────────────────
class Appended(Frame, frozen=True, array_like=True, tag=65):
    """
    The batch is stored. Its first message has the offset `base_offset`.

    The offset is -1 for a repeated batch of numbered rows whose offset is no longer known.
    """

    base_offset: int
    durable: str
    duplicate: bool
    copies: int = 1
    """The number of data folders that have the batch, synced: the broker's own, and those of the
    copies that acks wait for.
    """


class Acquired(Frame, frozen=True, array_like=True, tag=66):
    """The caller owns the partition for its group, and continues at `cursor`. The `ranges` above
    the cursor are already acked.
    """

    cursor: int
    ranges: tuple[tuple[int, int], ...]
    next_offset: int
    sealed: bool
    attempts: tuple[tuple[int, int], ...] = ()
    """The messages that have failed and are not acked, as (offset, number of failed attempts)."""
    parked_version: int = 0
    """The version of the parked messages, which operators may change; 0 if no messages are
    parked.
    """
    adopted: tuple[int, ...] = ()
    """The parents whose parked messages the partition has adopted."""
    suspects_upto: int = 0
    """Unacked messages below this offset are suspects: two owners that ended without a release may
    have been handling them.
    """
    begun: tuple[tuple[int, int], ...] = ()
    """The messages that earlier owners were handling when they ended without a release, as (offset,
    number of crashes).
    """
    adopted_under: tuple[tuple[int, int], ...] = ()
    """The adopted parents and the token of the owner that adopted from each, where known."""
    unreleased: bool = False
    """True if a previous owner ended without a release. Redriven messages are then handled one key
    at a time.
    """


class Batches(Frame, frozen=True, array_like=True, tag=67):
    """The payload contains whole batches. The first one may begin below the requested offset."""

    first_offset: int
    """The first offset of the partition that is still stored."""
    next_offset: int
    """The offset that follows the partition's last durable message."""
    upto: int
    """The offset that follows the last message in the payload, or the requested offset if the
    payload is empty.
    """
    sealed: bool
    parked_version: int = 0
    left_out: tuple[tuple[int, int], ...] = ()
    """The ranges `[start, end)` below `upto` that are omitted, because none of their messages has a
    wanted tag.
    """
    more: bool = False
    """True if another answer to the same request follows, beginning at `upto`."""


class Acked(Frame, frozen=True, array_like=True, tag=68):
    """The acks are durable. `cursor` is the group's cursor after the acks."""

    cursor: int
    parked_version: int = 0
    promise_ms: int = 0
    """How long no higher token is let in, in milliseconds from the sending of the ack on; 0: there
    is no promise.
    """
    is_wanted: bool = False
    """True if a higher token waits: there will be no further promise, so hand over."""


class Released(Frame, frozen=True, array_like=True, tag=69):
    """The pull lock is free."""


class Handed(Frame, frozen=True, array_like=True, tag=70):
    """
    The messages in `ranges` are in flight to the session. The payload contains their batches.

    The session must not handle any other messages in these batches.
    """

    ranges: tuple[tuple[int, int], ...]
    cursor: int
    next_offset: int
    sealed: bool
    crashes: tuple[tuple[int, int], ...] = ()
    """The messages in `ranges` that sessions had in flight when they ended without a release, as
    (offset, number of crashes).
    """
    tries: tuple[tuple[int, int], ...] = ()
    """The messages in `ranges` that have failed, as (offset, number of failed attempts in all
    sessions).
    """


class Scheduled(Frame, frozen=True, array_like=True, tag=71):
    """The message is durable, and will be delivered at the requested time."""

    broker_group: str
    durable: str


class ScheduledCanceled(Frame, frozen=True, array_like=True, tag=72):
    """The outcome of a cancellation, as a CancelOutcome."""

    outcome: str


class ParkedChanged(Frame, frozen=True, array_like=True, tag=73):
    """The changes are durable."""

    parked_version: int


class ParkedKeys(Frame, frozen=True, array_like=True, tag=74):
    """The payload is a list of `parked.ParkedKeyRow`. `following` is the number of the first key on
    the next page; None if this is the last page.
    """

    parked_version: int
    following: int | None
    unneeded_ancestors: tuple[int, ...] = ()
    """Ancestors that keep messages for the group, although none of those is still parked."""


class ParkedRows(Frame, frozen=True, array_like=True, tag=75):
    """Parked messages as (source, start, end), oldest first, and the total number of messages for
    the key.
    """

    rows: tuple[tuple[int, int, int], ...]
    messages: int
    edited: tuple[tuple[int, int], ...] = ()
    """The edited messages in these rows, as (source, offset); see ReadEdited."""


class ParkedToAdopt(Frame, frozen=True, array_like=True, tag=76):
    """The payload is a list of `parked.AdoptedKey`. `following` is the first row of the next page;
    None: this is the last page.
    """

    following: int | None
    sources: tuple[int, ...] = ()
    """Ancestors that keep messages for the group."""


class ParkedEdited(Frame, frozen=True, array_like=True, tag=80):
    """The edited value of a parked message, in the payload. `properties` is None if the message has
    not been edited.
    """

    properties: bytes | None


class Welcome(Frame, frozen=True, array_like=True, tag=86):
    """The broker accepts this client."""

    version: str
    """The version of the broker."""


class Followed(Frame, frozen=True, array_like=True, tag=87):
    """
    Bytes of the log, as they are in the broker's files. The payload begins at `position`, and lies
    within one segment.

    If `position` is not the one that was asked for, the log begins there: what the copy has lies
    before it, or the copy has nothing.
    """

    broker_id: str
    opening: str
    """The name of the broker's present opening."""
    end: int
    """The end of the log, without a commit that is being synced."""
    first_position: int
    segment: int
    """The position at which the segment of the payload begins."""
    position: int
    is_offered: bool = False
    """True if the broker stores nothing more, and waits until the copy has taken its place."""
    is_durable: bool = True
    """False: the broker was restarted, and copies that acks wait for may lack the end of its log,
    so that it may be cut.
    """


class Challenged(Frame, frozen=True, array_like=True, tag=83):
    """The challenge of this connection, or b"" if the server does not authenticate callers."""

    nonce: bytes


class Authenticated(Frame, frozen=True, array_like=True, tag=84):
    """The connection has the rights of the capability for the next `ends_in_ms`."""

    ends_in_ms: int


class Throttled(Frame, frozen=True, array_like=True, tag=85):
    """
    A notice with correlation id 0: the broker delays the frames of this connection by `wait_ms`,
    because a limit has been reached.

    Calls in progress may take that much longer.
    """

    wait_ms: int
    limit: str
    """The name of the limit, for display."""


class Refused(Frame, frozen=True, array_like=True, tag=127):
    """An error: its code, text, details and fate."""

    code: int
    message: str
    details: dict[str, Any]
    fate: str = "not_done"
    hint: str = ""
    """The hint for this error, with at most HINT_CHARS_MAX characters; "" stands for the default
    hint of its code.
    """


Request = (
    Append
    | Acquire
    | Pull
    | Ack
    | Release
    | Read
    | AcquireShared
    | PullShared
    | Schedule
    | CancelScheduled
    | ChangeParked
    | ListParked
    | ReadParked
    | AdoptParked
    | ReleaseParked
    | EditParked
    | ReadEdited
    | Hello
    | Challenge
    | Authenticate
    | Follow
)
READING = frozenset({Read, ListParked, ReadParked, ReadEdited, Follow})
"""The types of requests that change nothing."""
Answer = (
    Appended
    | Acquired
    | Batches
    | Acked
    | Released
    | Handed
    | Scheduled
    | ScheduledCanceled
    | ParkedChanged
    | ParkedKeys
    | ParkedRows
    | ParkedToAdopt
    | ParkedEdited
    | Challenged
    | Authenticated
    | Throttled
    | Welcome
    | Followed
    | Refused
)
Header = TypeVar("Header", Request, Answer)

_TAGS = {kind: kind.__struct_config__.tag for kind in (*get_args(Request), *get_args(Answer))}
_SHORT_ARRAY, _U16, _U32 = 0x90, 0xCD, 0xCE
"""Type bytes of msgpack: an array of up to 15 items, and integers of two and four bytes. A small
integer is encoded as its own byte.
"""
_HEADS = {
    _SHORT_ARRAY + items << 8 | tag: bytes((_SHORT_ARRAY + items - 1, tag))
    for items in range(2, 16)
    for tag in _TAGS.values()
}
"""Maps the first two bytes of a header, as an integer, to the bytes with which it begins once its
correlation id has been cut out. For headers of up to 15 items.
"""
_NO_PAYLOAD = memoryview(b"")
_encode_header = msgspec.msgpack.Encoder().encode
_header_items = msgspec.msgpack.Decoder(list[msgspec.Raw]).decode
_correlation_id = msgspec.msgpack.Decoder(int).decode
_decode_request: Callable[[bytes | bytearray], Request] = msgspec.msgpack.Decoder(Request).decode
_decode_answer: Callable[[bytes | bytearray], Answer] = msgspec.msgpack.Decoder(Answer).decode


def encode_frame(
    correlation_id: int,
    header: Request | Answer,
    payload: bytes | bytearray | memoryview = b"",
) -> bytes:
    """
    Return the header and the payload as one frame.

    Raises:
        MessageTooLargeError: the frame exceeds FRAME_BYTES_MAX, or its header exceeds
            HEADER_BYTES_MAX.
    """
    return b"".join(frame_parts(correlation_id, header, payload))


def frame_parts(
    correlation_id: int,
    header: Request | Answer,
    payload: bytes | bytearray | memoryview = b"",
) -> tuple[bytes, bytes | bytearray | memoryview]:
    """Return a frame in two parts, the second of which is the payload itself. Raises the same
    errors as `encode_frame`.
    """
    packed = _encode_header((_TAGS[type(header)], correlation_id, *astuple(header)))
    header_bytes = len(packed)
    size = _LENGTHS.size + header_bytes + (len(payload) if payload else 0)
    if size > FRAME_BYTES_MAX or header_bytes > HEADER_BYTES_MAX:
        raise MessageTooLargeError("frame too large", size_bytes=size, limit_bytes=FRAME_BYTES_MAX)
    return _LENGTHS.pack(size - SIZE.size, header_bytes) + packed, payload


def _decode(
    decode: Callable[[bytes | bytearray], Header], kind: str, data: bytes | bytearray
) -> tuple[int, Header, memoryview]:
    size = len(data)
    if not _LENGTHS.size < size <= FRAME_BYTES_MAX:
        raise FrameError(f"frame size out of range: {size} bytes", size_bytes=size)
    claimed_bytes, header_bytes = _LENGTHS.unpack_from(data)
    if claimed_bytes != size - 4:
        raise FrameError(f"a frame of {size} bytes claims to have {claimed_bytes}", size_bytes=size)
    end = 8 + header_bytes
    if not 0 < header_bytes <= HEADER_BYTES_MAX or end > size:
        raise FrameError(
            f"a frame claims to have a header of {header_bytes} bytes", size_bytes=size
        )
    try:
        # Fast path: nearly every header is a short array, so its correlation id can be cut out.
        if end > 10 and (head := _HEADS.get(data[8] << 8 | data[9])) is not None:
            number, position = data[10], 11
            if number == _U16:
                number, position = data[11] << 8 | data[12], 13
            elif number == _U32:
                number, position = int.from_bytes(data[11:15]), 15
            elif number >= 0x80:
                position = end + 1
            if position <= end:
                header = decode(head + data[position:end])
                payload = memoryview(data).toreadonly()[end:] if end < size else _NO_PAYLOAD
                return number, header, payload
        items = _header_items(memoryview(data)[8:end])
        number, header = _correlation_id(items.pop(1)), decode(_encode_header(items))
    except (msgspec.MsgspecError, UnicodeDecodeError, IndexError, RecursionError) as error:
        raise FrameError(f"unreadable {kind}: {error}") from error
    return number, header, memoryview(data).toreadonly()[end:]


decode_request = partial(_decode, _decode_request, "request")
"""
Decode a client's frame into its correlation id, header and payload.

Raises FrameError if a length is wrong, the tag is unknown, or the fields do not match the tag.
"""
decode_answer = partial(_decode, _decode_answer, "answer")
"""Decode a broker's frame into its correlation id, header and payload. Raises FrameError like
`decode_request`.
"""


def is_long_poll(request: Request) -> TypeGuard[Pull | PullShared | Read | Follow]:
    """Return True if a request may wait for messages at the broker. Such requests do not count
    against the limits on other calls.
    """
    return isinstance(request, Pull | PullShared) or (
        isinstance(request, Read | Follow) and request.wait_ms > 0
    )


def refusal(error: KeylaneError) -> Refused:
    """Return the answer that reports `error`."""
    return Refused(
        error.code,
        wire_text(error.message),
        wire_details(error),
        error.fate.value,
        specific_hint(error),
    )


def refusal_error(refused: Refused) -> KeylaneError:
    """Return the error in `refused`, with the fate that the peer reported."""
    error = error_from_wire(refused.code, refused.message, refused.details, refused.hint)
    error.fate = _FATES.get(refused.fate, Fate.UNKNOWN)
    return error
