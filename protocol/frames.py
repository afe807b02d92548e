"""Frames of the data plane: requests and answers on one connection between a client and a broker.
Pure.

    ┌──────────┬──────────────────┬────────────────────────────────────────────────┬─────────┐
    │ size u32 │ header bytes u32 │ header: msgpack array [tag, correlation id, …] │ payload │
    └──────────┴──────────────────┴────────────────────────────────────────────────┴─────────┘

`size` counts the bytes after it; a frame of size 0 asks for a sign of life, or is one.
The tag and the fields after the correlation id are those of a struct below. An answer repeats the
correlation id of its request; answers may arrive in any order. No request has the id 0: with it a
broker says why it closes the connection. Durations are in milliseconds. `token` is a fencing
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
    own_hint,
    wire_details,
    wire_text,
)
from .limits import FRAME_BYTES_MAX
from .parked.views import FailingMessage

SIZE = struct.Struct("<I")
"""The first field of a frame."""
SIGN_OF_LIFE = bytes(SIZE.size)
HEADER_BYTES_MAX = 1 << 18
_LENGTHS = struct.Struct("<II")
_FATES: dict[str, Fate] = {fate.value: fate for fate in Fate}


class Frame(msgspec.Struct, frozen=True, array_like=True):
    """Base of all requests and answers."""


# ── requests ──────────────────────────────────────────────────────────────────────────────────────
class Append(Frame, frozen=True, array_like=True, tag=1):
    """Store the batch in the payload. Answer: Appended."""

    partition_id: int


class Acquire(Frame, frozen=True, array_like=True, tag=2):
    """Raise the fence to `token`, durably, and take the pull lock. Answer: Acquired."""

    partition_id: int
    group: str
    session: str
    token: int
    ttl_ms: int


class Pull(Frame, frozen=True, array_like=True, tag=3):
    """Fetch batches from `offset` on, under the pull lock, and renew the lock. Answer: Batches."""

    partition_id: int
    group: str
    session: str
    token: int
    offset: int
    bytes_max: int
    wait_ms: int
    """Milliseconds for which the broker may wait for messages before it answers without any."""
    tags: tuple[str, ...] = ()
    """The broker may leave out batches in which no message has one of these tags; (): it leaves
    none out.
    """
    answers_max: int = 1
    """Most answers that it may have, of which each but the last has `Batches.more`; `bytes_max` and
    `wait_ms` hold for all of them together.
    """


class Ack(Frame, frozen=True, array_like=True, tag=4):
    """Mark ranges `[start, end)` as handled; without ranges only renew the lock. Answer: Acked,
    once durable.
    """

    partition_id: int
    group: str
    session: str
    token: int
    ranges: tuple[tuple[int, int], ...]
    failed: tuple[tuple[int, int], ...] = ()
    """(offset, failed tries so far) of messages that failed since the last ack."""
    failing: FailingMessage | None = None
    """Oldest message that failed and is not handled, as long as there is one."""
    begun: tuple[tuple[int, int], ...] = ()
    """
    (offset, crashes) of suspects that are handed to a handler once this is durable.

    If the owner ends before it acks them, reports their failure, or releases, the next owner learns
    of them.
    """
    held: tuple[tuple[int, int], ...] = ()
    """Ranges that handlers of this session still have, in a shared group; they stay in flight for
    `in_flight_ms` from now on.
    """
    in_flight_ms: int = 0


class Release(Frame, frozen=True, array_like=True, tag=5):
    """Give the pull lock back. Answer: Released."""

    partition_id: int
    group: str
    session: str
    token: int


class Read(Frame, frozen=True, array_like=True, tag=6):
    """Fetch batches from `offset` on, without group or lock. Answer: Batches."""

    partition_id: int
    offset: int
    bytes_max: int
    background: bool = False
    """True if a job reads, so that the broker serves live clients first."""
    wait_ms: int = 0
    """Same meaning as in Pull."""


class AcquireShared(Frame, frozen=True, array_like=True, tag=7):
    """
    Like Acquire, for a shared group: every session may present the same token. Answer: Acquired.

    A session's in-flight messages are released after the broker has received no frame from it for
    `ttl_ms`.
    """

    partition_id: int
    group: str
    session: str
    token: int
    ttl_ms: int


class PullShared(Frame, frozen=True, array_like=True, tag=8):
    """
    Fetch messages that are not in flight. The session acks them within `in_flight_ms`, or they are
    redelivered. Answer: Handed.

    Ack and Release are those of an exclusive group. Each pull and each ack renews the session; an
    ack also renews the messages that it names as held. A Release returns every message that the
    session has in flight.
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
    Have the broker store the message in the payload at its time. Answer: Scheduled, once durable.

    The payload is a batch of one message without a key, with partition id 0. A repeat with the
    same `scheduled_id` is stored once.
    """

    subject: str
    deliver_at_ms: int
    """Time of delivery by the calendar, in milliseconds since 1970."""
    scheduled_id: bytes
    """16 bytes that the sender draws at random."""


class CancelScheduled(Frame, frozen=True, array_like=True, tag=10):
    """Never deliver a scheduled message. Answer: ScheduledCanceled, once durable."""

    scheduled_id: bytes


class ChangeParked(Frame, frozen=True, array_like=True, tag=11):
    """
    Change what the group has parked: the payload is a list of `parked.ParkChange`. Answer:
    ParkedChanged, once durable.

    Either all changes are made, or none. A repeat changes nothing.
    """

    partition_id: int
    group: str
    session: str
    token: int
    next_tries: tuple[tuple[int, int, int, int], ...] = ()
    """Next tries of messages that wait for retry, for people: number of tries, source, offset,
    milliseconds since 1970.
    """


class ListParked(Frame, frozen=True, array_like=True, tag=12):
    """List the keys that the group has parked, from the `first`th on. Answer: ParkedKeys."""

    partition_id: int
    group: str
    session: str
    token: int
    first: int


class ReadParked(Frame, frozen=True, array_like=True, tag=13):
    """Find the offsets of `count` parked messages of a key, after its first `first` ranges.
    Answer: ParkedRows.
    """

    partition_id: int
    group: str
    session: str
    token: int
    key: bytes | int | None
    count: int
    first: int = 0


class TakeParked(Frame, frozen=True, array_like=True, tag=14):
    """
    Take over what the group has parked on a drained parent, for keys in the logical partitions
    `[start, end)`. Answer: ParkedTaken.

    The owner of a child asks, and needs no token of the parent. From then on nothing changes
    there.
    """

    partition_id: int
    group: str
    start: int
    end: int
    first: int
    """First row of the answer, counted from 0."""


class LeaveParked(Frame, frozen=True, array_like=True, tag=15):
    """
    Report that the owner of a child no longer needs what the group had parked on an ancestor.
    Answer: ParkedChanged.

    It concerns keys in the logical partitions `[start, end)`.
    """

    partition_id: int
    group: str
    start: int
    end: int
    token: int = 0
    """Token of the owner. It is refused below the ancestor's fence, because after a reset more may
    be parked. 0: not known.
    """


class EditParked(Frame, frozen=True, array_like=True, tag=20):
    """
    Store an operator's new value of a parked message, which is the payload. Answer: ParkedEdited,
    once durable.

    `key` is the key under which it is parked, None for dead letters; `source` and `offset` name its
    original.
    """

    partition_id: int
    group: str
    key: bytes | None
    source: int
    offset: int
    properties: bytes
    """Properties in their packed form."""


class ReadEdited(Frame, frozen=True, array_like=True, tag=21):
    """Read the value that an operator has stored for a parked message; fields are those of
    EditParked. Answer: ParkedEdited.
    """

    partition_id: int
    group: str
    key: bytes | int | None
    source: int
    offset: int


class Hello(Frame, frozen=True, array_like=True, tag=24):
    """First frame of every connection, with the client's version. Answer: Welcome, or a refusal if
    the versions are too far apart.
    """

    version: str


class Challenge(Frame, frozen=True, array_like=True, tag=22):
    """Ask for the challenge that the holder of a capability has to sign on this connection.
    Answer: Challenged.
    """


class Authenticate(Frame, frozen=True, array_like=True, tag=23):
    """
    Say who calls on this connection; repeated before the capability ends. Answer: Authenticated.

    `proof` is the signature of the capability's holder over the challenge of this connection and
    the broker's address.
    """

    capability: str
    proof: bytes
    address: str
    """Address under which the caller has reached the broker."""


# ── answers ───────────────────────────────────────────────────────────────────────────────────────
class Appended(Frame, frozen=True, array_like=True, tag=65):
    """
    The batch is stored from `base_offset` on.

    -1: it repeats a batch of numbered rows whose offset is no longer known.
    """

    base_offset: int
    durable: str
    duplicate: bool


class Acquired(Frame, frozen=True, array_like=True, tag=66):
    """The caller owns the partition for its group. It continues at `cursor`; `ranges` above the
    cursor are acked.
    """

    cursor: int
    ranges: tuple[tuple[int, int], ...]
    next_offset: int
    sealed: bool
    attempts: tuple[tuple[int, int], ...] = ()
    """(offset, failed tries) of messages that failed and are not acked."""
    parked_version: int = 0
    """Changes when an operator changes what is parked; 0: nothing is parked."""
    adopted: tuple[int, ...] = ()
    """Parents whose parked messages the partition has taken over."""
    suspects_upto: int = 0
    """Messages below this offset that are not acked may have been with handlers of two owners that
    ended without a release.
    """
    begun: tuple[tuple[int, int], ...] = ()
    """(offset, crashes) of messages that earlier owners had begun when they ended without a
    release.
    """
    adopted_under: tuple[tuple[int, int], ...] = ()
    """(parent, token of the owner that took over its parked messages), where that is known."""
    unreleased: bool = False
    """A previous owner ended without a release, so redriven messages are handled one key at a time.
    """


class Batches(Frame, frozen=True, array_like=True, tag=67):
    """Whole batches in the payload. The first may begin below the requested offset."""

    first_offset: int
    """First offset of the partition that is still stored."""
    next_offset: int
    """Offset after the partition's last durable message."""
    upto: int
    """Offset after the last one in the payload; the requested offset if the payload is empty."""
    sealed: bool
    parked_version: int = 0
    left_out: tuple[tuple[int, int], ...] = ()
    """Ranges `[start, end)` below `upto` that are not in the payload, because none of their
    messages has a wanted tag.
    """
    more: bool = False
    """Another answer to the same request follows, which begins at `upto`."""


class Acked(Frame, frozen=True, array_like=True, tag=68):
    """The acks are durable; `cursor` is the group's cursor after them."""

    cursor: int
    parked_version: int = 0


class Released(Frame, frozen=True, array_like=True, tag=69):
    """The pull lock is free."""


class Handed(Frame, frozen=True, array_like=True, tag=70):
    """
    The messages in `ranges` are in flight at the session; their batches are the payload.

    Other messages in these batches are not for the session to handle.
    """

    ranges: tuple[tuple[int, int], ...]
    cursor: int
    next_offset: int
    sealed: bool
    crashes: tuple[tuple[int, int], ...] = ()
    """(offset, number) of crashes, for messages of `ranges` that sessions had in flight when they
    ended without a release.
    """
    tries: tuple[tuple[int, int], ...] = ()
    """(offset, number) of failed tries of messages of `ranges`, at any session."""


class Scheduled(Frame, frozen=True, array_like=True, tag=71):
    """The message is durable, and will be delivered at its time."""

    broker_group: str
    durable: str


class ScheduledCanceled(Frame, frozen=True, array_like=True, tag=72):
    """The outcome of a cancel, a CancelOutcome."""

    outcome: str


class ParkedChanged(Frame, frozen=True, array_like=True, tag=73):
    """The changes are durable."""

    parked_version: int


class ParkedKeys(Frame, frozen=True, array_like=True, tag=74):
    """Keys, a list of `parked.ParkedKeyRow`, in the payload; `following` is the first row of the
    next page, if there is one.
    """

    parked_version: int
    following: int | None
    unneeded: tuple[int, ...] = ()
    """Ancestors that keep messages for the group, though none of those is parked any more."""


class ParkedRows(Frame, frozen=True, array_like=True, tag=75):
    """Messages as (source, start, end), the oldest first, and the number of all messages of the
    key.
    """

    rows: tuple[tuple[int, int, int], ...]
    messages: int
    edited: tuple[tuple[int, int], ...] = ()
    """(source, offset) of messages in these rows that were edited; see ReadEdited."""


class ParkedTaken(Frame, frozen=True, array_like=True, tag=76):
    """Keys, a list of `parked.AdoptedKey`, in the payload; `following` is the first row of the next
    page, if there is one.
    """

    following: int | None
    sources: tuple[int, ...] = ()
    """Ancestors that keep messages for the group."""


class ParkedEdited(Frame, frozen=True, array_like=True, tag=80):
    """The stored edit of a parked message, whose value is the payload; `properties` is None if it
    was not edited.
    """

    properties: bytes | None


class Welcome(Frame, frozen=True, array_like=True, tag=86):
    """The broker serves this client."""

    version: str
    """Version of the broker."""


class Challenged(Frame, frozen=True, array_like=True, tag=83):
    """The challenge of this connection. b"": this server does not authenticate callers."""

    nonce: bytes


class Authenticated(Frame, frozen=True, array_like=True, tag=84):
    """Frames of this connection are served with the rights of the capability, for `ends_in_ms`."""

    ends_in_ms: int


class Throttled(Frame, frozen=True, array_like=True, tag=85):
    """
    A notice with correlation id 0: frames of this connection wait for `wait_ms`, because a limit is
    used up.

    Each call in progress may take that much longer.
    """

    wait_ms: int
    limit: str
    """Name of the limit, for people."""


class Refused(Frame, frozen=True, array_like=True, tag=127):
    """An error with its code, text, details and fate."""

    code: int
    message: str
    details: dict[str, Any]
    fate: str = "not_done"
    hint: str = ""
    """Advice for this error, of at most HINT_CHARS_MAX characters; "": the hint of its code holds.
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
    | TakeParked
    | LeaveParked
    | EditParked
    | ReadEdited
    | Hello
    | Challenge
    | Authenticate
)
READING = frozenset({Read, ListParked, ReadParked, ReadEdited})
"""Requests that change nothing."""
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
    | ParkedTaken
    | ParkedEdited
    | Challenged
    | Authenticated
    | Throttled
    | Welcome
    | Refused
)
Header = TypeVar("Header", Request, Answer)

_TAGS = {kind: kind.__struct_config__.tag for kind in (*get_args(Request), *get_args(Answer))}
_SHORT_ARRAY, _U16, _U32 = 0x90, 0xCD, 0xCE
"""First bytes in msgpack of an array of up to 15 items, and of numbers of two and four bytes; a
small number is its own byte.
"""
_HEADS = {
    _SHORT_ARRAY + items << 8 | tag: bytes((_SHORT_ARRAY + items - 1, tag))
    for items in range(2, 16)
    for tag in _TAGS.values()
}
"""First bytes of a header without its correlation id, by the first two bytes of the header, as a
number, with up to 15 items.
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
    Return header and payload as one frame.

    Raises:
        MessageTooLargeError: the frame is over FRAME_BYTES_MAX, or its header over
            HEADER_BYTES_MAX.
    """
    return b"".join(frame_parts(correlation_id, header, payload))


def frame_parts(
    correlation_id: int,
    header: Request | Answer,
    payload: bytes | bytearray | memoryview = b"",
) -> tuple[bytes, bytes | bytearray | memoryview]:
    """Return a frame in two parts, of which the second is the payload itself. It raises the errors
    of `encode_frame`.
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
        raise FrameError(f"a frame of {size} bytes", size_bytes=size)
    claimed, header_bytes = _LENGTHS.unpack_from(data)
    if claimed != size - 4:
        raise FrameError(f"a frame of {size} bytes that claims {claimed}", size_bytes=size)
    end = 8 + header_bytes
    if not 0 < header_bytes <= HEADER_BYTES_MAX or end > size:
        raise FrameError(f"a frame that claims {header_bytes} bytes of header", size_bytes=size)
    try:
        # Nearly every header is a short array whose number is cut out; any other is taken apart.
        if end > 10 and (head := _HEADS.get(data[8] << 8 | data[9])) is not None:
            number, at = data[10], 11
            if number == _U16:
                number, at = data[11] << 8 | data[12], 13
            elif number == _U32:
                number, at = int.from_bytes(data[11:15]), 15
            elif number >= 0x80:
                at = end + 1
            if at <= end:
                header = decode(head + data[at:end])
                payload = memoryview(data).toreadonly()[end:] if end < size else _NO_PAYLOAD
                return number, header, payload
        items = _header_items(memoryview(data)[8:end])
        number, header = _correlation_id(items.pop(1)), decode(_encode_header(items))
    except (msgspec.MsgspecError, UnicodeDecodeError, IndexError, RecursionError) as error:
        raise FrameError(f"unreadable {kind}: {error}") from error
    return number, header, memoryview(data).toreadonly()[end:]


decode_request = partial(_decode, _decode_request, "request")
"""
Decode a client's frame to correlation id, header and payload.

Raises FrameError: a length does not fit, the tag is unknown, or the fields are not those of the
tag.
"""
decode_answer = partial(_decode, _decode_answer, "answer")
"""Decode a broker's frame to correlation id, header and payload. Raises FrameError like
`decode_request`.
"""


def is_long_poll(request: Request) -> TypeGuard[Pull | PullShared | Read]:
    """Return whether a request may wait for messages at the broker, so that limits of other calls
    do not count it.
    """
    return isinstance(request, Pull | PullShared) or (
        isinstance(request, Read) and request.wait_ms > 0
    )


def refusal(error: KeylaneError) -> Refused:
    """Return the answer that carries `error`."""
    return Refused(
        error.code,
        wire_text(error.message),
        wire_details(error),
        error.fate.value,
        own_hint(error),
    )


def refusal_error(refused: Refused) -> KeylaneError:
    """Return the error that `refused` carries, with the fate that the peer gave it."""
    error = error_from_wire(refused.code, refused.message, refused.details, refused.hint)
    error.fate = _FATES.get(refused.fate, Fate.UNKNOWN)
    return error
