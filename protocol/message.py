"""What users hold: a message handed to a handler, and the receipt of one that was sent.  Pure."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Literal, Protocol

import msgspec

from .errors import ClosedError, CorruptBatchError, InvalidRequestError, MessageTooLargeError
from .limits import KEY_BYTES_MAX, MESSAGE_BYTES_MAX, PROPERTIES_BYTES_MAX
from .text import counted

_NO_PROPERTIES: Mapping[str, str] = MappingProxyType({})
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(dict[str, str]).decode

SHOWN_BYTES = 32
"""Of a key or a value, in the text of a message."""


class Delivery(Protocol):
    """Whoever handed a message out, and takes its ack."""

    @property
    def queue(self) -> int:
        """Number of the logic queue that its messages are of."""
        ...

    @property
    def logic_start(self) -> int:
        """What their offsets have to be raised by to be logic offsets."""
        ...

    async def ack(self, message: Message) -> None:
        """Take the ack of a message handed out here."""
        ...


class Message(msgspec.Struct, gc=False):
    """
    One message as stored.

    `offset` counts messages in `partition_id`, from 0; `fencing_token` is the right under which it was
    delivered: pass it on to whatever the handler writes to, so that a late owner can be refused there.
    `packed_properties` and `delivery` are the client's: a program asks for `properties`, and acks with `ack`.
    """

    subject: str
    key: bytes
    """b"" when it was sent without one."""
    value: bytes
    offset: int
    partition_id: int
    sent_at_ns: int
    """Nanoseconds since 1970, by the sender's calendar."""
    fencing_token: int = 0
    attempt: int = 1
    packed_properties: bytes = b""
    delivery: Delivery | None = None

    def __repr__(self) -> str:
        """Where it is, and the first bytes of its key and value: short, however large the message is."""
        return (
            f"<Message of {self.subject} partition {self.partition_id} offset {self.offset}, "
            f"key {_beginning(self.key)}, value {_beginning(self.value)}, attempt {self.attempt}>"
        )

    async def ack(self) -> None:
        """
        Say that this message is handled; the ack queue carries it to the broker within milliseconds.

        For messages of `async for`; what a handler returned from is acked already.  Again is harmless.

        Raises:
            LeaseLostError: another consumer owns the partition now and will get the message again.
            ClosedError: the message was not handed out by a consumer.
        """
        if self.delivery is None:
            raise ClosedError("this message was read, not handed out by a consumer")
        await self.delivery.ack(self)

    @property
    def queue(self) -> int:
        """Number of its logic queue; -1 if it is not known where the message was stored."""
        return -1 if self.delivery is None else self.delivery.queue

    @property
    def logic_offset(self) -> int:
        """Its offset in its logic queue, which stays when the queue moves; of a static subject only."""
        return self.offset + (0 if self.delivery is None else self.delivery.logic_start)

    @property
    def properties(self) -> Mapping[str, str]:
        """The properties the sender gave; read only.  Raises CorruptBatchError."""
        return unpack_properties(self.packed_properties)


def _beginning(data: bytes) -> str:
    return f"{data[:SHOWN_BYTES]!r}{'…' * (len(data) > SHOWN_BYTES)} ({counted(len(data), 'byte')})"


class Receipt(msgspec.Struct, frozen=True):
    """Where an acked message is, and how safe."""

    partition_id: int
    offset: int
    """-1 if the broker knows the message as stored earlier but no longer at which offset."""
    durable: str
    """"fsync": on the broker's disk."""
    duplicate: bool | Literal["possible"] = False
    """
    True if an earlier try had been stored already: the broker recognised the repeat, and it is stored once.
    "possible" if an earlier try may be stored beside this one, because it was sent where nobody answered any more.
    """
    reordered: bool = False
    """True if it left its partition (BEST_TRIED only), so that older messages of its key may come after it."""


class TableReceipt(msgspec.Struct, frozen=True):
    """What `send_arrow` has stored."""

    stored: int
    """Rows."""
    refused: dict[int, str]
    """Why rows were left out, by row number; only with `partial=True`."""


def pack_properties(properties: Mapping[str, str] | None) -> bytes:
    """
    Properties as bytes; nothing for none.

    Raises:
        InvalidRequestError: a name or a value is not text.
        MessageTooLargeError: over 64 KiB.
    """
    if not properties:
        return b""
    given: Mapping[Any, Any] = properties
    try:
        pairs = given.items()
    except AttributeError:
        kind = type(properties).__name__
        raise InvalidRequestError(f"properties map text to text; this is a {kind}") from None
    for name, value in pairs:
        if not isinstance(name, str) or not isinstance(value, str):
            raise InvalidRequestError(
                f"a property is text = text, not {name!r:.80} = {value!r:.80}"
            )
    try:
        packed = _encode(dict(properties))
    except UnicodeEncodeError as error:
        raise InvalidRequestError(f"a property that is not valid text: {error.reason}") from error
    if len(packed) > PROPERTIES_BYTES_MAX:
        raise MessageTooLargeError(
            "properties too large", size_bytes=len(packed), limit_bytes=PROPERTIES_BYTES_MAX
        )
    return packed


def unpack_properties(packed: bytes | memoryview) -> Mapping[str, str]:
    """
    The properties that `pack_properties` packed; read only.

    Raises:
        CorruptBatchError: the bytes are something else.
    """
    if not packed:
        return _NO_PROPERTIES
    try:
        return MappingProxyType(_decode(packed))
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise CorruptBatchError(f"unreadable properties: {error}") from error


def check_message_size(key_bytes: int, value_bytes: int, properties_bytes: int) -> None:
    """
    Let a message of these sizes through.

    Raises:
        MessageTooLargeError: key over 1 KiB, or all three together over 1 MiB.
    """
    if key_bytes > KEY_BYTES_MAX:
        raise MessageTooLargeError(
            "order key too large", size_bytes=key_bytes, limit_bytes=KEY_BYTES_MAX
        )
    size = key_bytes + value_bytes + properties_bytes
    if size > MESSAGE_BYTES_MAX:
        raise MessageTooLargeError(size_bytes=size, limit_bytes=MESSAGE_BYTES_MAX)
