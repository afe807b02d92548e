"""The values that users get: a message to handle, and the receipts of what was sent.  Pure."""

from __future__ import annotations

from collections.abc import Collection, Coroutine, Iterable, Mapping
from types import MappingProxyType
from typing import Any, Generic, Literal, NoReturn, Protocol, cast

import msgspec

from .codecs.codec import Codec, V, decode_value
from .errors import ClosedError, CorruptBatchError, InvalidRequestError, MessageTooLargeError
from .limits import KEY_BYTES_MAX, MESSAGE_BYTES_MAX, PROPERTIES_BYTES_MAX
from .text import bad_text, counted, items_of

_NO_PROPERTIES: Mapping[str, str | bytes] = MappingProxyType({})
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(dict[str, Any]).decode

OWN_PREFIX = "keylane."
"""Of the names of properties that keylane sets and reads itself."""
TAGS_PROPERTY = "keylane.tags"
"""The property that has a message's tags, with commas between them."""
EDITED_PROPERTY = "keylane.edited"
"""Of a parked message that an operator has edited: when, as ISO 8601 in UTC."""
SENT_ON = frozenset({TAGS_PROPERTY, EDITED_PROPERTY})
"""Own properties that programs may send: with the properties of a message that they send on, of
which they stay true.
"""

SHOWN_BYTES = 32
"""Bytes of a key or a value that `repr(message)` shows."""


def not_handed_out(which: str) -> ClosedError:
    """Make the error of an ack of a message that no consumer handed out; `which` begins its text,
    as "this message".
    """
    error = ClosedError(f"{which} was read, not handed out by a consumer")
    error.hint = (
        "Ack or give back only what a handler, an iteration or `getmany` of a "
        "consumer in a group gets."
    )
    return error


class Delivery(Protocol):
    """The client that delivered a message and takes its ack."""

    @property
    def queue(self) -> int:
        """Number of the logic queue of the client's partition."""
        ...

    @property
    def logic_start(self) -> int:
        """Logic offset of the partition's offset 0: logic offset = `logic_start` + offset."""
        ...

    @property
    def codec(self) -> Codec[Any] | None:
        """The codec of the client; None: values are bytes."""
        ...

    @property
    def group(self) -> str:
        """The consumer group of the client; "" if messages are only read."""
        ...

    @property
    def cursor(self) -> int:
        """The offset below which all messages are acked; none of them is delivered again under the
        same token.
        """
        ...

    @property
    def leased_id(self) -> int:
        """The partition whose lease the messages are handled under: their own, or a child that has
        parked them.
        """
        ...

    @property
    def exclusive(self) -> bool:
        """True if no other session has messages of the partition under the same token."""
        ...

    @property
    def is_copied(self) -> bool:
        """True in another process than that of the client: `cursor` is what it was when the message
        was pickled.
        """
        ...

    def ack(self, message: Message[Any]) -> Coroutine[Any, Any, None]:
        """Take the ack of a message that this client delivered."""
        ...

    def nack(self, message: Message[Any], after_s: float) -> Coroutine[Any, Any, None]:
        """Take a message back that this client delivered."""
        ...


class Lease(msgspec.Struct, frozen=True, gc=False):
    """
    The right under which a message is handled: of a consumer group's owner of one partition.

    Tokens are compared within one `partition_id` of one group: a store that keeps the highest
    `token` of each refuses a late owner.  Tokens of different partitions say nothing about each
    other.
    """

    partition_id: int
    """The partition that is leased: the message's own, or that of a child which handles what its
    parent has parked.
    """
    token: int
    """Higher with each owner of the partition."""


def lease_of(partition_id: int, token: int) -> Lease | None:
    """The lease; None without a token, as of what is only read or broadcast."""
    return Lease(partition_id, token) if token > 0 else None


class Message(msgspec.Struct, Generic[V], gc=False):
    """
    One message as stored; `Message[Order]` is that of a client with a codec for `Order`.

    `offset` counts messages in the partition, from 0.
    `fencing_token` is the token of `lease`, whose partition may be another one than `partition_id`:
    a handler passes `lease` to the system that it writes to, which can then refuse writes of an
    earlier owner. `packed_properties` and `delivery` belong to the client: a program reads
    `properties`, and acks with `ack`.
    """

    subject: str
    key: bytes
    """b"" if the message was sent without a key."""
    value: bytes
    """As stored; `decode` makes of it what the sender's program sent."""
    offset: int
    partition_id: int
    sent_at_ns: int
    """
    Nanoseconds since 1970, by the sender's calendar.  A producer reads it once in a turn of its
    event loop, and for each batch: messages that were sent one after another without an `await`
    between them may have the same time.
    """
    fencing_token: int = 0
    attempt: int = 1
    packed_properties: bytes = b""
    delivery: Delivery | None = None

    def __hash__(self) -> int:
        """By its place, which equal messages share: messages go into sets and are keys of dicts."""
        return hash((self.subject, self.partition_id, self.offset))

    def __repr__(self) -> str:
        """Subject, partition and offset, and the first bytes of key and value: short for a message
        of any size.
        """
        return (
            f"<Message of {self.subject} partition {self.partition_id} offset {self.offset}, "
            f"key {_beginning(self.key)}, value {_beginning(self.value)}, attempt {self.attempt}>"
        )

    def ack(self) -> Coroutine[Any, Any, None]:
        """
        Ack this message: it is handled.  The ack queue sends the ack to the broker within
        milliseconds.

        This is for messages of `async for` and `getmany`.  A message that was passed to a handler
        is acked when the handler returns. A repeated ack is harmless.

        Raises:
            LeaseLostError: another consumer owns the partition now, and the message is delivered to
                it again.
            InvalidRequestError: the message was given back, and comes again.
            ClosedError: no consumer delivered the message.
        """
        if self.delivery is None:
            raise not_handed_out("this message")
        return self.delivery.ack(self)

    def nack(self, *, after_s: float = 0) -> Coroutine[Any, Any, None]:
        """
        Give this message back: it is handed out again, before any later message of its key.

        This is for messages of `async for` and `getmany`; a handler raises `keylane.Retry`.
        Messages of other keys come meanwhile.  Later messages of its key that are in hand, after
        `getmany`, are given back with it.

        Args:
            after_s: seconds until it is handed out again, at the earliest; up to a day.  If its
                partition is handed over before, its next owner gets it at once.

        Raises:
            InvalidRequestError: the message is acked, or given back already, or it was passed to a
                handler; or `after_s` is no such number.
            LeaseLostError: another consumer owns the partition now, and the message is delivered to
                it again.
            ClosedError: no consumer delivered the message.
        """
        if self.delivery is None:
            raise not_handed_out("this message")
        return self.delivery.nack(self, after_s)

    def decode(self) -> V:
        """
        The value, decoded by the codec of the client that delivered the message; `value` itself
        without a codec.

        Each call decodes again.  In a handler the error is as any other: the message is tried
        again.

        Raises:
            CodecError: the codec cannot decode the value; the cause has its error.
        """
        codec = None if self.delivery is None else self.delivery.codec
        if codec is None:
            return cast(V, self.value)
        value = decode_value(
            codec,
            self.value,
            subject=self.subject,
            partition_id=self.partition_id,
            offset=self.offset,
        )
        return cast(V, value)

    @property
    def lease(self) -> Lease | None:
        """The lease under which the message is handled; None if it was only read, or broadcast."""
        if self.delivery is None:
            return None
        return lease_of(self.delivery.leased_id, self.fencing_token)

    @property
    def group(self) -> str:
        """The consumer group that got the message; "" if it was only read."""
        return "" if self.delivery is None else self.delivery.group

    @property
    def queue(self) -> int:
        """Number of the message's logic queue; -1 if no client delivered the message."""
        return -1 if self.delivery is None else self.delivery.queue

    @property
    def logic_offset(self) -> int:
        """Offset in the logic queue of a static subject.  It stays the same when the queue moves to
        another partition.
        """
        return self.offset + (0 if self.delivery is None else self.delivery.logic_start)

    @property
    def properties(self) -> Mapping[str, str | bytes]:
        """The properties that the sender gave, text or bytes by name; read only.  Raises
        CorruptBatchError.
        """
        return unpack_properties(self.packed_properties)

    @property
    def tags(self) -> tuple[str, ...]:
        """The tags that the sender gave, in their order.  Raises CorruptBatchError."""
        joined = self.properties.get(TAGS_PROPERTY)
        return tuple(joined.split(",")) if joined and isinstance(joined, str) else ()


def _beginning(data: bytes) -> str:
    return f"{data[:SHOWN_BYTES]!r}{'…' * (len(data) > SHOWN_BYTES)} ({counted(len(data), 'byte')})"


class Receipt(msgspec.Struct, frozen=True, gc=False):
    """Where a sent message is stored, and how durably."""

    partition_id: int
    offset: int
    """-1 if the broker knows that the message was stored earlier, but not at which offset."""
    durable: str
    """"fsync": on the broker's disk."""
    duplicate: bool | Literal["possible"] = False
    """
    True if the broker recognised a repeated batch: the message was stored by an earlier try, and is
    stored once. "possible" if an earlier try may be stored as well: it was sent to a broker that
    did not answer.
    """
    reordered: bool = False
    """True if the message left its partition (BEST_TRIED only): older messages of its key may be
    stored after it.
    """
    queue: int | None = None
    """Number of the logic queue; None if the subject is not static."""
    logic_offset: int | None = None
    """Offset in the logic queue; None if the subject is not static, or if `offset` is -1."""


class TableReceipt(msgspec.Struct, frozen=True):
    """What `send_arrow` has stored."""

    stored: int
    """Rows."""
    refused: dict[int, str]
    """Why rows were left out, by row number; only with `partial=True`."""


def refuse_text(**given: object) -> NoReturn:
    """Raises InvalidRequestError: one of these is not bytes."""
    name, value = next((name, value) for name, value in given.items() if type(value) is not bytes)
    advice = ""
    if isinstance(value, str):
        advice = f": use {name}.encode()"
    elif isinstance(value, bytes | bytearray | memoryview):
        advice = f": use bytes({name})"
    elif name == "value":
        advice = "; a codec makes bytes of other values: as codec=JsonCodec()"
    elif value is None:
        advice = ": leave it out for a message without a key"
    raise InvalidRequestError(f"{name} must be bytes, not {type(value).__name__}{advice}")


def check_own(given: Iterable[str], kept: Collection[str] = ()) -> None:
    """
    Check that no name belongs to keylane.

    Args:
        kept: names that may be there all the same.

    Raises:
        InvalidRequestError
    """
    for name in given:
        if name.startswith(OWN_PREFIX) and name not in SENT_ON and name not in kept:
            raise InvalidRequestError(
                f"properties whose names begin with {OWN_PREFIX!r} are keylane's own: leave out "
                f"{name!r:.80}, also of a "
                "message that is sent on"
            )


def pack_properties(
    properties: Mapping[str, str | bytes] | None,
    tags: Collection[str] = (),
    *,
    kept: Collection[str] = (),
) -> bytes:
    """
    Properties and tags as bytes; b"" without either.

    Args:
        kept: names of keylane's own that are let through.

    Raises:
        InvalidRequestError: a name is not text, or keylane's own, a value neither text nor bytes,
            or a tag no text without commas.
        MessageTooLargeError: the packed properties are over 64 KiB.
    """
    given: dict[Any, Any] = {}
    if properties is not None:
        try:
            given = dict(properties.items())
        except AttributeError:
            kind = type(properties).__name__
            raise InvalidRequestError(
                f"properties map text to text or bytes; this is a {kind}"
            ) from None
    for name, value in given.items():
        if type(name) is not str or (type(value) is not str and type(value) is not bytes):
            given = _plain_properties(given)
            break
    if given:
        check_own(given, kept)
    try:
        tagged = bool(tags)
    except ValueError:  # an array of several
        tagged = True
    if tagged:
        if TAGS_PROPERTY in given:
            raise InvalidRequestError(f"tags are given twice: as {TAGS_PROPERTY!r} and as `tags`")
        given[TAGS_PROPERTY] = _joined(tags)
    if not given:
        return b""
    try:
        packed = _encode(given)
    except UnicodeEncodeError as error:
        what = "a tag" if tagged and error.object == given[TAGS_PROPERTY] else "a property"
        raise InvalidRequestError(f"{what} that is not valid text: {bad_text(error)}") from error
    if len(packed) > PROPERTIES_BYTES_MAX:
        raise MessageTooLargeError(
            f"properties too large: {len(packed)} bytes, at most {PROPERTIES_BYTES_MAX}",
            size_bytes=len(packed),
            limit_bytes=PROPERTIES_BYTES_MAX,
        )
    return packed


def _plain_properties(given: Mapping[Any, Any]) -> dict[Any, Any]:
    """
    Properties without classes that derive from text or bytes, as those of numpy and enumerations
    do.

    The packer refuses some of them, and takes the value of a member of an enumeration, which may be
    a number.

    Raises:
        InvalidRequestError: a name is not text, or a value neither text nor bytes.
    """
    plain = {}
    for name, value in given.items():
        if not isinstance(name, str) or not isinstance(value, str | bytes):
            raise InvalidRequestError(
                f"a property is text = text or bytes, not {name!r:.80} = {value!r:.80}"
            )
        plain[str.__str__(name)] = (
            str.__str__(value) if isinstance(value, str) else bytes(memoryview(value))
        )
    return plain


def _joined(tags: Collection[str]) -> str:
    """The value of TAGS_PROPERTY.  Raises InvalidRequestError."""
    listed = [] if isinstance(tags, Mapping) else items_of(tags)
    if not listed or not all(isinstance(tag, str) and tag and "," not in tag for tag in listed):
        raise InvalidRequestError(
            f"tags are texts without commas, as tags=['paid'], not {tags!r:.80}"
        )
    return ",".join(listed)


def unpack_properties(packed: bytes | memoryview) -> Mapping[str, str | bytes]:
    """
    The properties that `pack_properties` packed; read only.

    Raises:
        CorruptBatchError: the bytes are not packed properties.
    """
    if not packed:
        return _NO_PROPERTIES
    try:
        properties = _decode(packed)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise CorruptBatchError(f"unreadable properties: {error}") from error
    for value in properties.values():
        if type(value) is not str and type(value) is not bytes:
            raise CorruptBatchError(
                f"unreadable properties: a value is neither text nor bytes: {value!r:.40}"
            )
    return MappingProxyType(properties)


def check_message_size(
    key_bytes: int, value_bytes: int, properties_bytes: int, limit_bytes: int = MESSAGE_BYTES_MAX
) -> None:
    """
    Check that a message is not too large; sizes are bytes.

    Args:
        limit_bytes: the limit of the subject.

    Raises:
        MessageTooLargeError: the key is over 1 KiB, or key, value and properties together are over
            the limit.
    """
    if key_bytes > KEY_BYTES_MAX:
        raise key_too_large(key_bytes)
    size = key_bytes + value_bytes + properties_bytes
    if size > limit_bytes:
        raise message_too_large(size, limit_bytes)


def key_too_large(key_bytes: int) -> MessageTooLargeError:
    """The error of a message whose key is over the limit."""
    error = MessageTooLargeError(
        f"order key too large: {key_bytes} bytes, at most {KEY_BYTES_MAX}",
        size_bytes=key_bytes,
        limit_bytes=KEY_BYTES_MAX,
    )
    error.hint = "Send a digest of it as the key."
    return error


def message_too_large(size_bytes: int, limit_bytes: int) -> MessageTooLargeError:
    """The error of a message whose key, value and properties together are over the limit of its
    subject.
    """
    return MessageTooLargeError(
        f"the message is too large: {size_bytes} bytes of key, value and properties, at most "
        f"{limit_bytes}",
        size_bytes=size_bytes,
        limit_bytes=limit_bytes,
    )
