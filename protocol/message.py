"""The values that users get: messages to handle, and receipts of sent messages. Pure."""

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
"""Prefix of the names of properties that keylane sets and reads itself."""
TAGS_PROPERTY = "keylane.tags"
"""Property with a message's tags, separated by commas."""
EDITED_PROPERTY = "keylane.edited"
"""Property of a parked message that an operator has edited: the time, as ISO 8601 in UTC."""
SENT_ON = frozenset({TAGS_PROPERTY, EDITED_PROPERTY})
"""Keylane's own properties that programs may send: they stay true when a program forwards a message
with its properties.
"""

SHOWN_BYTES = 32
"""Bytes of a key or a value that `repr(message)` shows."""


def not_handed_out(which: str) -> ClosedError:
    """Return the error of an ack for a message that no consumer handed out; its text begins with
    `which`, such as "this message".
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
        """Codec of the client; None: values are bytes."""
        ...

    @property
    def group(self) -> str:
        """Consumer group of the client; "" if messages are only read."""
        ...

    @property
    def cursor(self) -> int:
        """Offset below which all messages are acked; none of them is delivered again under the same
        token.
        """
        ...

    @property
    def leased_id(self) -> int:
        """Partition under whose lease the messages are handled: their own, or a child that has
        taken them over as parked.
        """
        ...

    @property
    def exclusive(self) -> bool:
        """True if no other session has messages of the partition under the same token."""
        ...

    @property
    def is_copied(self) -> bool:
        """True in another process than the client's, where `cursor` has the value at the time of
        pickling.
        """
        ...

    def ack(self, message: Message[Any]) -> Coroutine[Any, Any, None]:
        """Ack a message that this client delivered."""
        ...

    def nack(self, message: Message[Any], after_s: float) -> Coroutine[Any, Any, None]:
        """Give back a message that this client delivered."""
        ...


class Lease(msgspec.Struct, frozen=True, gc=False):
    """
    The right under which a message is handled, which a consumer group's owner has on one partition.

    Tokens are compared within one `partition_id` of one group: a store that keeps the highest
    `token` of each can refuse a late owner. Tokens of different partitions cannot be compared.
    """

    partition_id: int
    """Leased partition: the message's own, or that of a child which handles the messages that its
    parent has parked.
    """
    token: int
    """Fencing token, which is higher with each owner of the partition."""


def lease_of(partition_id: int, token: int) -> Lease | None:
    """Return the lease; None without a token, because the message is only read or broadcast."""
    return Lease(partition_id, token) if token > 0 else None


class Message(msgspec.Struct, Generic[V], gc=False):
    """
    One message as stored; `Message[Order]` comes from a client with a codec for `Order`.

    `offset` counts messages in the partition, from 0.
    `fencing_token` is the token of `lease`, whose partition may differ from `partition_id`: a
    handler passes `lease` to the system that it writes to, which can then refuse writes of an
    earlier owner.
    `packed_properties` and `delivery` belong to the client: a program reads `properties`, and acks
    with `ack`.
    """

    subject: str
    key: bytes
    """b"" if the message was sent without a key."""
    value: bytes
    """Stored bytes; `decode` returns the value that the sender's program sent."""
    offset: int
    partition_id: int
    sent_at_ns: int
    """
    Nanoseconds since 1970, by the sender's calendar. A producer reads it once in a turn of its
    event loop, and for each batch: messages that were sent one after another without an `await`
    between them may have the same time.
    """
    fencing_token: int = 0
    attempt: int = 1
    packed_properties: bytes = b""
    delivery: Delivery | None = None

    def __hash__(self) -> int:
        """Return a hash of its place, which equal messages share, so that sets and dicts can hold
        messages.
        """
        return hash((self.subject, self.partition_id, self.offset))

    def __repr__(self) -> str:
        """Return subject, partition, offset, and the first bytes of key and value: short for a
        message of any size.
        """
        return (
            f"<Message of {self.subject} partition {self.partition_id} offset {self.offset}, "
            f"key {_beginning(self.key)}, value {_beginning(self.value)}, attempt {self.attempt}>"
        )

    def ack(self) -> Coroutine[Any, Any, None]:
        """
        Ack this message, because it is handled. The ack queue sends the ack to the broker within
        milliseconds.

        This is for messages of `async for` and `getmany`. A message that was passed to a handler
        is acked when the handler returns. A repeated ack is harmless.

        Raises:
            LeaseLostError: another consumer owns the partition now, and the message is delivered to
                it again.
            InvalidRequestError: the message was given back, and will be handed out again.
            ClosedError: no consumer delivered the message.
        """
        if self.delivery is None:
            raise not_handed_out("this message")
        return self.delivery.ack(self)

    def nack(self, *, after_s: float = 0) -> Coroutine[Any, Any, None]:
        """
        Give this message back; it is handed out again, before any later message of its key.

        This is for messages of `async for` and `getmany`; a handler raises `keylane.Retry`.
        Messages of other keys are handed out before that. Later messages of its key that the
        program has, after `getmany`, are given back with it.

        Args:
            after_s: least seconds until it is handed out again; up to a day. If its partition is
                handed over before, the next owner gets it at once.

        Raises:
            InvalidRequestError: the message is acked, or already given back, or it was passed to a
                handler; or `after_s` is not such a number.
            LeaseLostError: another consumer owns the partition now, and the message is delivered to
                it again.
            ClosedError: no consumer delivered the message.
        """
        if self.delivery is None:
            raise not_handed_out("this message")
        return self.delivery.nack(self, after_s)

    def decode(self) -> V:
        """
        Return the value, decoded by the codec of the client that delivered the message; `value`
        itself without a codec.

        Each call decodes again. In a handler the error counts like any other: the message is tried
        again.

        Raises:
            CodecError: the codec cannot decode the value; its error is the cause.
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
        """Lease under which the message is handled; None if it was only read, or broadcast."""
        if self.delivery is None:
            return None
        return lease_of(self.delivery.leased_id, self.fencing_token)

    @property
    def group(self) -> str:
        """Consumer group that got the message; "" if it was only read."""
        return "" if self.delivery is None else self.delivery.group

    @property
    def queue(self) -> int:
        """Number of the message's logic queue; -1 if no client delivered the message."""
        return -1 if self.delivery is None else self.delivery.queue

    @property
    def logic_offset(self) -> int:
        """Offset in the logic queue of a static subject. It stays the same when the queue moves to
        another partition.
        """
        return self.offset + (0 if self.delivery is None else self.delivery.logic_start)

    @property
    def properties(self) -> Mapping[str, str | bytes]:
        """Properties that the sender gave, text or bytes by name; read only. Raises
        CorruptBatchError.
        """
        return unpack_properties(self.packed_properties)

    @property
    def tags(self) -> tuple[str, ...]:
        """Tags that the sender gave, in their order. Raises CorruptBatchError."""
        joined = self.properties.get(TAGS_PROPERTY)
        return tuple(joined.split(",")) if joined and isinstance(joined, str) else ()


def _beginning(data: bytes) -> str:
    return f"{data[:SHOWN_BYTES]!r}{'…' * (len(data) > SHOWN_BYTES)} ({counted(len(data), 'byte')})"


class Receipt(msgspec.Struct, frozen=True, gc=False):
    """The place of a sent message, and how durably it is stored."""

    partition_id: int
    offset: int
    """Offset in the partition; -1 if the broker knows that the message was stored earlier, but not
    at which offset.
    """
    durable: str
    """How durable the message is; "fsync": on the broker's disk."""
    duplicate: bool | Literal["possible"] = False
    """
    True if the broker recognised a repeated batch: an earlier try stored the message, and it is
    stored once. "possible" if an earlier try may have stored it as well: it was sent to a broker
    that did not answer.
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
    """The result of `send_arrow`."""

    stored: int
    """Number of stored rows."""
    refused: dict[int, str]
    """Reasons of the rows that were left out, by row number; only with `partial=True`."""


def refuse_text(**given: object) -> NoReturn:
    """Raise InvalidRequestError for the first of these values that is not bytes."""
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
        kept: names that are allowed all the same.

    Raises:
        InvalidRequestError
    """
    for name in given:
        if name.startswith(OWN_PREFIX) and name not in SENT_ON and name not in kept:
            raise InvalidRequestError(
                f"properties whose names begin with {OWN_PREFIX!r} are keylane's own: leave out "
                f"{name!r:.80}, also when a message is forwarded"
            )


def pack_properties(
    properties: Mapping[str, str | bytes] | None,
    tags: Collection[str] = (),
    *,
    kept: Collection[str] = (),
) -> bytes:
    """
    Return properties and tags as bytes; b"" without either.

    Args:
        kept: names of keylane's own properties that are allowed.

    Raises:
        InvalidRequestError: a name is not text, or is keylane's own; a value is neither text nor
            bytes; or a tag is not text without commas.
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
    except ValueError:  # an array with several items has no truth value
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
    Return properties without classes that derive from text or bytes, such as numpy's and
    enumerations.

    The packer refuses some of them, and takes the value of an enumeration's member, which may be a
    number.

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
    """Return the value of TAGS_PROPERTY. Raises InvalidRequestError."""
    listed = [] if isinstance(tags, Mapping) else items_of(tags)
    if not listed or not all(isinstance(tag, str) and tag and "," not in tag for tag in listed):
        raise InvalidRequestError(
            f"tags are texts without commas, as tags=['paid'], not {tags!r:.80}"
        )
    return ",".join(listed)


def unpack_properties(packed: bytes | memoryview) -> Mapping[str, str | bytes]:
    """
    Return the properties that `pack_properties` packed, read only.

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
    Check that a message is not too large; sizes are in bytes.

    Args:
        limit_bytes: limit of the subject.

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
    """Return the error for a message whose key is over the limit."""
    error = MessageTooLargeError(
        f"order key too large: {key_bytes} bytes, at most {KEY_BYTES_MAX}",
        size_bytes=key_bytes,
        limit_bytes=KEY_BYTES_MAX,
    )
    error.hint = "Send a digest of it as the key."
    return error


def message_too_large(size_bytes: int, limit_bytes: int) -> MessageTooLargeError:
    """Return the error for a message whose key, value and properties together are over the limit of
    its subject.
    """
    return MessageTooLargeError(
        f"the message is too large: {size_bytes} bytes of key, value and properties, at most "
        f"{limit_bytes}",
        size_bytes=size_bytes,
        limit_bytes=limit_bytes,
    )
