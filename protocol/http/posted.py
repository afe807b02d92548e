"""Parses the messages of an HTTP request, depending on its content type. Pure.

    application/json          one object, or an array of objects       see `message_json`
    application/x-ndjson      one object per line
    any other                 the body is the value of one message; its key is in the query or in
                              a header

All messages are checked before any is stored, so a single invalid message makes the request fail.
An error names its index in the request, counted from 0 like receipts and without blank lines.

Idempotency keys: a broker remembers the key of a request, and does not store the messages again if
the request is repeated.

    key                ──▶  producer id, at or above KEYED_IDS
    messages           ──▶  producer epoch: a digest of keys, values and properties in their order
    every partition         one batch of the request, with sequence 0; with sequence ASKED, the
                            broker only reports whether it has the batch

A broker remembers the batch durably, like the batches of a producer. A batch with the same id and
epoch is a repeat; one with another epoch has other messages, and is refused.
"""

from __future__ import annotations

from base64 import b64decode
from collections.abc import Callable, Iterable, Mapping, Sequence
from hashlib import blake2b
from typing import NamedTuple, TypeVar

import msgspec

from ..errors import InvalidRequestError, KeylaneError, MessageTooLargeError
from ..ids import KEYED_IDS
from ..limits import IDEMPOTENCY_KEY_CHARS_MAX, POSTED_MESSAGES_MAX
from ..message import check_message_size, message_too_large, pack_properties
from .message_json import KeyValueProperties, MessageObject, message_parts

T = TypeVar("T")
CONTENT_TYPE = "Content-Type"
KEY_HEADER = "Message-Key"
JSON = "application/json"
NDJSON = "application/x-ndjson"
RAW = "application/octet-stream"
_NDJSON_NAMES = frozenset({NDJSON, "application/ndjson", "application/jsonl"})
_objects = msgspec.json.Decoder(list[MessageObject] | MessageObject).decode
_object = msgspec.json.Decoder(MessageObject).decode


class PostedMessage(NamedTuple):
    """A message to store. `key` is b"" for a message without a key."""

    key: bytes
    value: bytes
    packed_properties: bytes

    @property
    def size(self) -> int:
        """The total size of the key, value and properties in bytes."""
        return len(self.key) + len(self.value) + len(self.packed_properties)


def check_sizes(
    messages: Sequence[PostedMessage], limit_bytes: int, *, only: Iterable[int] | None = None
) -> None:
    """
    Check the messages of a request against the limit of their subject.

    Args:
        only: the indices of the messages to check; None means all of them.

    Raises:
        MessageTooLargeError: a message exceeds the limit. The text names the first such message.
    """
    for index in range(len(messages)) if only is None else only:
        size = messages[index].size
        if size > limit_bytes:
            raise _error_of_message(message_too_large(size, limit_bytes), index, len(messages))


def posted_messages(body: bytes, params: Mapping[str, str]) -> list[PostedMessage]:
    """
    Return the messages of a request, in order.

    Args:
        params: the parameters `key` and `key_base64`, and the headers Content-Type and Message-Key,
            if they were sent.

    Raises:
        InvalidRequestError: the body does not match its content type or has no message, or the key
            is given twice.
        MessageTooLargeError: a message exceeds its limits, or there are more than
            POSTED_MESSAGES_MAX messages.
    """
    content = params.get(CONTENT_TYPE, RAW).partition(";")[0].strip().lower()
    key = requested_key(params)
    if content == JSON or content in _NDJSON_NAMES:
        if key is not None:
            raise InvalidRequestError(f"the key of a message in {content} is in its object")
        message_objects = _parse_json(body) if content == JSON else _parse_lines(body)
    elif content.startswith("multipart/"):
        raise InvalidRequestError(
            f"a body of {content[:80]!r} is not a message: send the value itself, {JSON} or "
            f"{NDJSON}"
        )
    else:
        message_objects = [(key or b"", body, None)]
    return [
        _check_message(message, index, len(message_objects))
        for index, message in enumerate(message_objects)
    ]


def requested_key(params: Mapping[str, str]) -> bytes | None:
    """
    Return the order key that a request gives in its query or a header, or None.

    Raises:
        InvalidRequestError: the key is given twice, empty, or not text or base64.
    """
    given_names = [name for name in ("key", "key_base64", KEY_HEADER) if name in params]
    if len(given_names) > 1:
        raise InvalidRequestError(f"the key is given more than once: {', '.join(given_names)}")
    if not given_names:
        return None
    text = params[given_names[0]]
    if not text:  # for example because a variable in a script is empty
        raise InvalidRequestError(
            f"{given_names[0]} is empty: leave it out for messages without a key, which have no "
            "order"
        )
    if given_names[0] == "key" and "\ufffd" in text:  # it replaces bytes that are not UTF-8
        raise InvalidRequestError("the key is not text: give its bytes as key_base64")
    if given_names[0] != "key_base64":
        try:
            return text.encode("utf-8", "surrogateescape")  # bytes of a header that are not UTF-8
        except UnicodeEncodeError as error:
            raise InvalidRequestError(f"the key is not text: {error.reason}") from None
    try:
        return b64decode(text, validate=True)
    except ValueError as error:
        raise InvalidRequestError(f"key_base64 is not base64: {error}") from None


def _parse_json(body: bytes) -> list[KeyValueProperties]:
    decoded = _decode_json(_objects, body, "the body")
    objects = decoded if isinstance(decoded, list) else [decoded]
    if not objects:
        raise InvalidRequestError("the body has no message")
    _check_count(len(objects))
    return [_parts(message, f"message {index}") for index, message in enumerate(objects)]


def _parse_lines(body: bytes) -> list[KeyValueProperties]:
    lines = [line for line in body.split(b"\n") if line.strip(b" \t\r")]
    if not lines:
        raise InvalidRequestError("the body has no message")
    _check_count(len(lines))
    return [
        _parts(_decode_json(_object, line, f"message {index}"), f"message {index}")
        for index, line in enumerate(lines)
    ]


def _decode_json(decode: Callable[[bytes], T], body: bytes, what: str) -> T:
    try:
        return decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequestError(f"{what} is not a message in JSON: {error}") from None


def _parts(message: MessageObject, what: str) -> KeyValueProperties:
    try:
        return message_parts(message)
    except InvalidRequestError as error:
        raise InvalidRequestError(f"{what}: {error.message}") from None


def _check_count(count: int) -> None:
    if count > POSTED_MESSAGES_MAX:
        raise MessageTooLargeError(
            f"a request has at most {POSTED_MESSAGES_MAX} messages, not {count}"
        )


def _check_message(part: KeyValueProperties, index: int, count: int) -> PostedMessage:
    key, value, properties = part
    try:
        packed = pack_properties(properties)
        check_message_size(len(key), len(value), len(packed))
    except KeylaneError as error:
        raise _error_of_message(error, index, count) from None
    return PostedMessage(key, value, packed)


def _error_of_message(error: KeylaneError, index: int, count: int) -> KeylaneError:
    """Add the index of a message to the text of its error, unless it is the only message."""
    if count == 1:
        return error
    return error.copy(message=f"message {index}: {error.message}")


IDEMPOTENCY_KEY = "Idempotency-Key"
ASKED = 1
"""The sequence of a batch that only queries the broker. The broker answers that it is a duplicate,
or refuses it because of the gap.
"""


class KeyedProducer(NamedTuple):
    """The producer id and epoch under which the messages of a request are stored."""

    producer_id: int
    producer_epoch: int


def keyed_producer(key: str, messages: Sequence[PostedMessage]) -> KeyedProducer:
    """
    Return the producer id and epoch of a request with an idempotency key.

    Raises:
        InvalidRequestError: the key is empty, longer than IDEMPOTENCY_KEY_CHARS_MAX, or not visible
            ASCII.
    """
    if not 0 < len(key) <= IDEMPOTENCY_KEY_CHARS_MAX or not (key.isascii() and key.isprintable()):
        raise InvalidRequestError(
            f"an {IDEMPOTENCY_KEY} is 1 to {IDEMPOTENCY_KEY_CHARS_MAX} printable "
            f"characters of ASCII"
        )
    key_digest = int.from_bytes(blake2b(key.encode(), digest_size=8).digest())
    digest = blake2b(digest_size=4)
    for message in messages:
        for part in message:
            digest.update(len(part).to_bytes(4))
            digest.update(part)
    return KeyedProducer(KEYED_IDS | key_digest >> 1, int.from_bytes(digest.digest()))
