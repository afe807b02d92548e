"""The messages and receipts that programs receive from the clients. Pure."""

from __future__ import annotations

from collections.abc import Collection, Coroutine, Iterable, Mapping
from types import MappingProxyType
from typing import Any, Generic, Literal, NoReturn, Protocol, Self, cast

import msgspec

from .codecs.codec import Codec, V, decode_value
from .errors import (
    ClosedError,
    CodecError,
    CorruptBatchError,
    InvalidRequestError,
    MessageTooLargeError,
)
from .limits import KEY_BYTES_MAX, MESSAGE_BYTES_MAX, PROPERTIES_BYTES_MAX
from .offsets import AckedOffsets
from .text import collect_items, counted, invalid_unicode_text

_NO_PROPERTIES: Mapping[str, str | bytes] = MappingProxyType({})
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(dict[str, Any]).decode

OWN_PREFIX = "keylane."
"""The prefix of the property names that are reserved for keylane."""
TAGS_PROPERTY = "keylane.tags"
"""The property that contains a message's tags, separated by commas."""
EDITED_PROPERTY = "keylane.edited"
"""The property of a parked message that an operator has edited. Its value is the time, as ISO 8601
in UTC.
"""
SENT_ON = frozenset({TAGS_PROPERTY, EDITED_PROPERTY})
"""The reserved properties that programs may send. They remain valid when a program forwards a
message with its properties.
"""

SHOWN_BYTES = 32
"""The maximum number of bytes of a key or a value in `repr(message)`."""


def not_delivered_error(which: str) -> ClosedError:
    """Return the error for acking or nacking a message that was not delivered by a consumer. Its
    text begins with `which`, such as "this message".
    """
    error = ClosedError(f"{which} was only read, not delivered by a consumer")
    error.hint = (
        "Ack or give back only messages that a consumer in a group delivers: to a handler, by "
        "iteration, or by `getmany`."
    )
    return error


class MessageShell(Protocol):
    """The shell of a partition, to the messages that it hands out: it takes their acks."""

    def ack(self, message: Message[Any]) -> Coroutine[Any, Any, None]:
        """Ack a message."""
        ...

    def nack(self, message: Message[Any], after_s: float) -> Coroutine[Any, Any, None]:
        """Give back a message, so that it is delivered again later."""
        ...


class GroupOffsets(Protocol):
    """What a group has acked of a partition."""

    cursor: int
    """The offset below which all messages are acked."""


class Delivery(msgspec.Struct, eq=False, weakref=True):
    """
    What messages of one partition have in common: where they are stored, and for whom they were
    fetched.

    Compared by identity, because a sink keeps state for each delivery; what a reader has read is
    the same wherever it was read. A pickled copy has the cursor of the time of pickling, and no
    shell.
    """

    subject: str
    queue: int
    """The number of the logic queue of the partition that stores them."""
    logic_start: int
    """The logic offset of the partition's offset 0: logic offset = `logic_start` + offset."""
    codec: Codec[Any] | None
    """The codec of the client; None if values are bytes."""
    group: str = ""
    """The consumer group; "" for a reader or a broadcast consumer."""
    cluster_id: str = ""
    """The identity of the cluster, to which partition ids, offsets and tokens belong; "" if the
    messages are only read.
    """
    leased_id: int = 0
    """The partition whose lease covers the messages: their own partition, or a child that has
    adopted them as parked messages.
    """
    exclusive: bool = False
    """True if only this session receives messages of the partition under its token."""
    is_loose: bool = False
    """True if later messages of a key do not wait for them."""
    acked: GroupOffsets = msgspec.field(default_factory=AckedOffsets)
    """Has the cursor; for parked messages it is 0, because they are below that of their partition
    although they are not handled.
    """
    shell: MessageShell | None = None
    """What takes acks; None: they were only read, or this is a copy."""
    is_copied: bool = False
    """True for a pickled copy."""

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, Delivery):
            return NotImplemented
        where = self.subject, self.queue, self.logic_start, self.codec
        is_read = self._is_only_read and other._is_only_read
        return is_read and where == (other.subject, other.queue, other.logic_start, other.codec)

    def __hash__(self) -> int:
        return hash((self.subject, self.queue)) if self._is_only_read else id(self)

    @property
    def _is_only_read(self) -> bool:
        """True if a reader has the messages: without a lease, and without acks."""
        return self.shell is None and not self.group and not self.leased_id

    @property
    def cursor(self) -> int:
        """The offset below which all messages are acked. They are not redelivered under the same
        token.
        """
        return self.acked.cursor

    def ack_error(self, message: Message[Any], which: str) -> ClosedError:
        """Return the error for acking or nacking a message of a delivery without a shell. If it is
        no copy, the text begins with `which`, such as "this message".
        """
        if not self.is_copied:
            return not_delivered_error(which)
        error = ClosedError(
            f"this is a copy of message {message.offset} of partition "
            f"{message.partition_id}, made by pickle"
        )
        error.hint = (
            "Ack or give back the message itself, in the process whose consumer delivered it."
        )
        return error

    def __reduce__(self) -> Any:
        # A handler may pass its message to a pool of processes, where there is no shell.
        is_copied = self.is_copied or self.shell is not None
        acked = AckedOffsets(self.cursor)
        values = (getattr(self, name) for name in self.__struct_fields__[:-3])
        return Delivery, (*values, acked, None, is_copied)

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, _memo: object) -> Self:
        return self


class Lease(msgspec.Struct, frozen=True, gc=False):
    """
    The lease under which a message is handled: a consumer group's right on one partition.

    Compare tokens only within one `partition_id` of one group. A store that keeps the highest
    `token` of each can refuse writes from an earlier owner.
    """

    partition_id: int
    """The leased partition: the message's own, or a child that handles messages parked by its
    parent.
    """
    token: int
    """The fencing token, which increases with each owner of the partition."""


def make_lease(partition_id: int, token: int) -> Lease | None:
    """Return the lease, or None if there is no token because a message is only read or
    broadcast.
    """
    return Lease(partition_id, token) if token > 0 else None


class Message(msgspec.Struct, Generic[V], gc=False):
    """
    One message as it is stored. A `Message[Order]` comes from a client that has a codec for
    `Order`.

    `offset` counts messages in the partition, from 0.
    `fencing_token` is the token of `lease`, whose partition may differ from `partition_id`: a
    handler passes `lease` to the system that it writes to, which can then refuse writes from an
    earlier owner. `packed_properties` and `delivery` are for the client: a program reads
    `properties`, and acks with `ack`.
    """

    subject: str
    key: bytes
    """The order key, or b"" if the message was sent without a key."""
    value: bytes
    """The stored bytes. `decode` returns the value that was sent."""
    offset: int
    partition_id: int
    sent_at_ns: int
    """The time of sending by the sender's wall clock, in nanoseconds since 1970. A producer reads
    the clock once per batch and iteration of its event loop, so messages that were sent without an
    `await` between them may have the same time.
    """
    fencing_token: int = 0
    attempt: int = 1
    """One more than the number of failed tries that are counted; 1 in a reader. In an exclusive
    group a try that ends with its process is counted only if the message was handed out alone.
    """
    packed_properties: bytes = b""
    delivery: Delivery | None = None

    def __hash__(self) -> int:
        """Return a hash of the subject, partition and offset, which are the same for equal
        messages.
        """
        return hash((self.subject, self.partition_id, self.offset))

    def __repr__(self) -> str:
        """Return the subject, partition and offset, and the first bytes of the key and value."""
        return (
            f"<Message of {self.subject} partition {self.partition_id} offset {self.offset}, "
            f"key {_excerpt(self.key)}, value {_excerpt(self.value)}, attempt {self.attempt}>"
        )

    def ack(self) -> Coroutine[Any, Any, None]:
        """
        Ack this message, because it has been handled. The ack is sent to the broker within
        milliseconds.

        Use this for messages from `async for` and `getmany`. A message that was passed to a handler
        is acked when the handler returns. Repeated acks are harmless.

        Raises:
            LeaseLostError: another consumer now owns the partition, and receives the message again.
            InvalidRequestError: the message was given back, and will be delivered again; or it was
                passed to a handler.
            ClosedError: no consumer delivered the message.
            UsageError: the consumer is open in another process or event loop.
        """
        delivery = self.delivery
        if delivery is None or delivery.shell is None:
            raise self._undelivered_error()
        return delivery.shell.ack(self)

    def nack(self, *, after_s: float = 0) -> Coroutine[Any, Any, None]:
        """
        Give this message back. It is delivered again, before any later message of its key.

        Use this for messages from `async for` and `getmany`; a handler raises `keylane.Retry`. In
        the meantime, messages of other keys are delivered. Later messages of the same key that the
        program has received from `getmany` are given back with it.

        Args:
            after_s: the minimum time until it is delivered again, in seconds, at most a day. If its
                partition is handed over before that, the next owner receives it immediately.

        Raises:
            InvalidRequestError: the message was already acked or given back, or was passed to a
                handler; or `after_s` is out of range.
            LeaseLostError: another consumer now owns the partition, and receives the message again.
            ClosedError: no consumer delivered the message.
            UsageError: the consumer is open in another process or event loop.
        """
        delivery = self.delivery
        if delivery is None or delivery.shell is None:
            raise self._undelivered_error()
        return delivery.shell.nack(self, after_s)

    def _undelivered_error(self) -> ClosedError:
        if self.delivery is None:
            return not_delivered_error("this message")
        return self.delivery.ack_error(self, f"message {self.offset}")

    def decode(self) -> V:
        """
        Return the value, decoded by the codec of the client that delivered the message, or `value`
        itself if there is no codec.

        The result is not cached. In a handler, a CodecError counts like any other failure: the
        message is retried.

        Raises:
            CodecError: the codec cannot decode the value. Its exception is the cause.
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
    def key_text(self) -> str:
        """
        The key as text. Keys that were sent as `str` can always be read as text.

        Raises:
            CodecError: the key is not UTF-8; `key` returns its bytes.
        """
        try:
            return self.key.decode()
        except UnicodeDecodeError as error:
            refused = CodecError(
                f"the key {_excerpt(self.key)} is not UTF-8 text",
                subject=self.subject,
                partition_id=self.partition_id,
                offset=self.offset,
            )
            refused.hint = "Read `message.key`, which returns the bytes."
            raise refused from error

    @property
    def lease(self) -> Lease | None:
        """The lease under which the message is handled; None if the message was only read or was
        broadcast.
        """
        if self.delivery is None:
            return None
        return make_lease(self.delivery.leased_id, self.fencing_token)

    @property
    def group(self) -> str:
        """The consumer group to which the message was delivered; "" if it was only read."""
        return "" if self.delivery is None else self.delivery.group

    @property
    def queue(self) -> int:
        """The number of the message's logic queue; -1 if the message was not delivered by a
        client.
        """
        return -1 if self.delivery is None else self.delivery.queue

    @property
    def logic_offset(self) -> int:
        """The offset in the logic queue of a static subject. It stays the same when the queue moves
        to another partition.
        """
        return self.offset + (0 if self.delivery is None else self.delivery.logic_start)

    @property
    def properties(self) -> Mapping[str, str | bytes]:
        """The properties of the message by name, as text or bytes. Read-only. Raises
        CorruptBatchError.
        """
        return unpack_properties(self.packed_properties)

    @property
    def tags(self) -> tuple[str, ...]:
        """The tags of the message, in the sender's order. Raises CorruptBatchError."""
        joined = self.properties.get(TAGS_PROPERTY)
        return tuple(joined.split(",")) if joined and isinstance(joined, str) else ()


def _excerpt(data: bytes) -> str:
    return f"{data[:SHOWN_BYTES]!r}{'…' * (len(data) > SHOWN_BYTES)} ({counted(len(data), 'byte')})"


class _NamedOtherwise:
    """An attribute that other systems have under this name; reading it raises AttributeError with
    advice. Unlike a `__getattr__`, it does not slow down the other attributes.
    """

    def __init__(self, owner: type, name: str, advice: str) -> None:
        self._error = f"{owner.__name__!r} object has no attribute {name!r}: use {advice}"
        self._name = name

    def __get__(self, instance: object, _owner: type) -> NoReturn:
        raise AttributeError(self._error, name=self._name, obj=instance)


def advise(owner: type, advice_by_name: Mapping[str, str]) -> None:
    """Make reading the names that other systems use raise an AttributeError with advice."""
    for name, advice in advice_by_name.items():
        setattr(owner, name, _NamedOtherwise(owner, name, advice))


class Receipt(msgspec.Struct, frozen=True, gc=False):
    """The location of a sent message, and its durability."""

    partition_id: int
    offset: int
    """The offset in the partition; -1 if the broker knows that an earlier attempt stored the
    message, but no longer knows at which offset.
    """
    durable: str
    """How durable the message is. "fsync" means that it is on the broker's disk."""
    duplicate: bool | Literal["possible"] = False
    """True if the broker recognised a repeated batch: an earlier attempt had stored the message,
    and it is stored only once. "possible" if it may be stored twice, because an earlier attempt
    went to a broker that did not answer.
    """
    reordered: bool = False
    """True if the message was stored in a partition other than its own (BEST_TRIED only): older
    messages of its key may be stored after it.
    """
    queue: int | None = None
    """The number of the logic queue; None if the subject is not static."""
    logic_offset: int | None = None
    """The offset in the logic queue; None if the subject is not static or `offset` is -1."""
    copies: int = 1
    """The number of data folders that have the message: the broker's own, and those of the copies
    that acks wait for.
    """


class TableReceipt(msgspec.Struct, frozen=True):
    """The result of `send_arrow`."""

    stored: int
    """The number of stored rows."""
    refused: dict[int, str]
    """Maps the numbers of skipped rows to the reasons. Used only with `partial=True`."""


NAMED_OTHERWISE = {
    "topic": "subject",
    "headers": "properties",
    "partition": "partition_id",
    "timestamp": "sent_at_ns, which is in nanoseconds since 1970",
    "body": "value, or decode() with a codec",
    "data": "value, or decode() with a codec",
    "routing_key": "key",
    "delivery_tag": "ack()",
}
"""Names of a message's attributes in other systems, with the equivalents in keylane."""
advise(Message, NAMED_OTHERWISE)
advise(
    Receipt,
    {
        "topic": "the subject that was given to send()",
        "partition": "partition_id",
        "timestamp": "sent_at_ns of the message, when it is received",
    },
)


def encode_key(key: object) -> bytes:
    """
    Return an order key as bytes, encoding text as UTF-8. b"" means no key, as in a message that was
    sent without one.

    Raises:
        InvalidRequestError: the key is neither bytes nor text; or it is an empty text, which is
            most often a variable without a value: its messages would silently have no order.
    """
    if isinstance(key, str):
        if not key:
            raise InvalidRequestError(
                'key is an empty text: leave it out, or give b"", for a message without a key, '
                "which has no order"
            )
        try:
            return key.encode()
        except UnicodeEncodeError as error:
            raise InvalidRequestError(f"key is not a text that UTF-8 has: {error}") from None
    if type(key) is not bytes:
        refuse_text(key=key)
    return key


def refuse_text(**given: object) -> NoReturn:
    """Raise InvalidRequestError for the first keyword argument that is not bytes."""
    name, value = next((name, value) for name, value in given.items() if type(value) is not bytes)
    advice = ""
    if isinstance(value, str):
        advice = f": use {name}.encode()"  # this is about a value, because a text key is encoded
    elif isinstance(value, bytes | bytearray | memoryview):
        advice = f": use bytes({name})"
    elif name == "value":
        advice = "; to send other values, set a codec, such as codec=JsonCodec()"
    elif value is None:
        advice = ": leave it out for a message without a key"
    kinds = "bytes or text" if name == "key" else "bytes"
    raise InvalidRequestError(f"{name} must be {kinds}, not {type(value).__name__}{advice}")


def check_not_reserved(given: Iterable[str], kept: Collection[str] = ()) -> None:
    """
    Check that no property name is reserved for keylane.

    Args:
        kept: reserved names that are allowed nevertheless.

    Raises:
        InvalidRequestError: a name is reserved.
    """
    for name in given:
        if name.startswith(OWN_PREFIX) and name not in SENT_ON and name not in kept:
            raise InvalidRequestError(
                f"property names that begin with {OWN_PREFIX!r} are reserved: leave out "
                f"{name!r:.80}, also when you forward a message"
            )


def pack_properties(
    properties: Mapping[str, str | bytes] | None,
    tags: Collection[str] = (),
    *,
    kept: Collection[str] = (),
) -> bytes:
    """
    Encode properties and tags as bytes. The result is b"" if there are none.

    Args:
        kept: reserved property names that are allowed nevertheless.

    Raises:
        InvalidRequestError: a name is not text, or is reserved; a value is neither text nor bytes;
            or a tag is not text or contains a comma.
        MessageTooLargeError: the packed properties exceed 64 KiB.
    """
    given: dict[Any, Any] = {}
    if properties is not None:
        try:
            given = dict(properties.items())
        except AttributeError:
            kind = type(properties).__name__
            raise InvalidRequestError(
                f"properties must be a mapping of text to text or bytes, not {kind}"
            ) from None
    for name, value in given.items():
        if type(name) is not str or (type(value) is not str and type(value) is not bytes):
            given = _plain_properties(given)
            break
    if given:
        check_not_reserved(given, kept)
    try:
        has_tags = bool(tags)
    except ValueError:  # an array with several items has no truth value
        has_tags = True
    if has_tags:
        if TAGS_PROPERTY in given:
            raise InvalidRequestError(
                f"tags are given twice: as property {TAGS_PROPERTY!r} and as `tags`"
            )
        given[TAGS_PROPERTY] = _join_tags(tags)
    if not given:
        return b""
    try:
        packed = _encode(given)
    except UnicodeEncodeError as error:
        kind = "a tag" if has_tags and error.object == given[TAGS_PROPERTY] else "a property"
        raise InvalidRequestError(f"{kind} is invalid: {invalid_unicode_text(error)}") from error
    if len(packed) > PROPERTIES_BYTES_MAX:
        raise MessageTooLargeError(
            f"properties too large: {len(packed)} bytes, at most {PROPERTIES_BYTES_MAX}",
            size_bytes=len(packed),
            limit_bytes=PROPERTIES_BYTES_MAX,
        )
    return packed


def _plain_properties(given: Mapping[Any, Any]) -> dict[Any, Any]:
    """
    Convert names and values that are instances of subclasses of str and bytes, such as numpy's
    types and enumerations, to plain ones.

    The encoder refuses some of them, and encodes the value of an enumeration member, which may be a
    number.

    Raises:
        InvalidRequestError: a name is not text, or a value is neither text nor bytes.
    """
    plain = {}
    for name, value in given.items():
        if not isinstance(name, str) or not isinstance(value, str | bytes):
            raise InvalidRequestError(
                f"a property has a text name and a text or bytes value, not {name!r:.80}: "
                f"{value!r:.80}"
            )
        plain[str.__str__(name)] = (
            str.__str__(value) if isinstance(value, str) else bytes(memoryview(value))
        )
    return plain


def _join_tags(tags: Collection[str]) -> str:
    """Return the value of TAGS_PROPERTY. Raises InvalidRequestError."""
    items = [] if isinstance(tags, Mapping) else collect_items(tags)
    if not items or not all(isinstance(tag, str) and tag and "," not in tag for tag in items):
        raise InvalidRequestError(
            f"tags are texts without commas, such as tags=['paid'], not {tags!r:.80}"
        )
    return ",".join(items)


def unpack_properties(packed: bytes | memoryview) -> Mapping[str, str | bytes]:
    """
    Return the properties that were encoded by `pack_properties`, as a read-only mapping.

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
    Check the size of a message. All sizes are in bytes.

    Args:
        limit_bytes: the subject's limit for the key, value and properties together.

    Raises:
        MessageTooLargeError: the key exceeds 1 KiB, or the key, value and properties together
            exceed the limit.
    """
    if key_bytes > KEY_BYTES_MAX:
        raise key_too_large(key_bytes)
    size = key_bytes + value_bytes + properties_bytes
    if size > limit_bytes:
        raise message_too_large(size, limit_bytes)


def key_too_large(key_bytes: int) -> MessageTooLargeError:
    """Return the error for a message whose key exceeds the limit."""
    error = MessageTooLargeError(
        f"order key too large: {key_bytes} bytes, at most {KEY_BYTES_MAX}",
        size_bytes=key_bytes,
        limit_bytes=KEY_BYTES_MAX,
    )
    error.hint = "Use a digest of the key instead."
    return error


def message_too_large(size_bytes: int, limit_bytes: int) -> MessageTooLargeError:
    """Return the error for a message whose key, value and properties together exceed the limit of
    its subject.
    """
    return MessageTooLargeError(
        f"the message is too large: {size_bytes} bytes of key, value and properties, at most "
        f"{limit_bytes}",
        size_bytes=size_bytes,
        limit_bytes=limit_bytes,
    )
