"""Messages as JSON objects, for `consume`, `produce --format json` and HTTP. Pure.

    bytes that are UTF-8 text      "value": "paid"
    other bytes                    "value_base64": "/w=="

The same applies to `key`, which is null for a message without a key. `properties` is an object with
the text properties, and `properties_base64` is one with the bytes properties. If the stored
properties cannot be decoded, because another program wrote them, `properties_base64` is a string
with all their bytes. This occurs only in output; it is not allowed in a message to send.
"""

from __future__ import annotations

from typing import Any, TypedDict, cast

import msgspec

from ..errors import CorruptBatchError, InvalidRequestError
from ..message import unpack_properties


class MessageObject(msgspec.Struct, forbid_unknown_fields=True):
    """A message to send, with exactly one of `value` and `value_base64`, and at most one of `key`
    and `key_base64`.
    """

    value: Any = msgspec.UNSET
    """A string is sent as UTF-8, and any other value as JSON."""
    value_base64: bytes | None = None
    key: str | None = None
    key_base64: bytes | None = None
    properties: dict[str, str] | None = None
    properties_base64: dict[str, bytes] | str | None = None
    """Maps names to bytes. A string, as in a printed message, is refused."""
    # These fields of a printed message are ignored.
    subject: Any = None
    partition_id: Any = None
    offset: Any = None
    fencing_token: Any = None
    lease: Any = None
    attempt: Any = None
    sent_at_ns: Any = None
    queue: Any = None
    logic_offset: Any = None


KeyValueProperties = tuple[bytes, bytes, dict[str, str | bytes] | None]


def read_message(line: bytes) -> KeyValueProperties:
    """
    Return the key, the value and the properties of `{"key": …, "value": …, "properties": …}`. A
    value that is not a string is encoded as JSON.

    Raises:
        InvalidRequestError: the line is not such an object, or is refused by `message_parts`.
    """
    try:
        parsed = msgspec.json.decode(line, type=MessageObject)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequestError(f"not a message in JSON: {error}") from None
    return message_parts(parsed)


def message_parts(parsed: MessageObject) -> KeyValueProperties:
    """
    Return the key, the value and the properties of a parsed object.

    Raises:
        InvalidRequestError: the object has no value, two values, two keys, an empty key, or two
            properties with the same name; or its `properties_base64` is a string.
    """
    properties = _parse_properties(parsed)
    key = (parsed.key or "").encode()
    if parsed.key_base64 is not None:
        _check_not_both("key", parsed.key)
        key = parsed.key_base64
    if not key and (parsed.key is not None or parsed.key_base64 is not None):
        raise InvalidRequestError(
            "not a message in JSON: the key is empty; leave it out, or give null, for a message "
            "without a key, which has no order"
        )
    if parsed.value_base64 is not None:
        _check_not_both("value", None if parsed.value is msgspec.UNSET else parsed)
        return key, parsed.value_base64, properties
    if parsed.value is msgspec.UNSET:
        raise InvalidRequestError("not a message in JSON: it has no `value`, nor `value_base64`")
    value = parsed.value
    packed = value.encode() if isinstance(value, str) else msgspec.json.encode(value)
    return key, packed, properties


def _parse_properties(parsed: MessageObject) -> dict[str, str | bytes] | None:
    texts, binary = parsed.properties, parsed.properties_base64
    if isinstance(binary, str):
        raise InvalidRequestError(
            "`properties_base64` as a text cannot be sent: a producer sends properties by their "
            "names; give `properties`, or leave both out to send the message without"
        )
    if texts is None and binary is None:
        return None
    duplicates = sorted((texts or {}).keys() & (binary or {}).keys())
    if duplicates:
        raise InvalidRequestError(
            f"not a message in JSON: property {duplicates[0]!r:.80} is given twice"
        )
    return {**(texts or {}), **(binary or {})}


def _check_not_both(name: str, other: object) -> None:
    if other is not None:
        raise InvalidRequestError(
            f"not a message in JSON: it has both `{name}` and `{name}_base64`"
        )


def bytes_field(name: str, data: bytes) -> dict[str, str | bytes]:
    """Return the field `name` with `data` as text or, if `data` is not UTF-8, the field
    `name_base64` with the bytes.
    """
    try:
        return {name: data.decode()}
    except UnicodeDecodeError:
        return {f"{name}_base64": data}


class KeyField(TypedDict, total=False):
    """The key of a message: `key`, or `key_base64` if it is not UTF-8."""

    key: str | None
    """None for a message without a key."""
    key_base64: bytes


def key_field(key: bytes | None) -> KeyField:
    """Return the field of a key."""
    return cast(KeyField, bytes_field("key", key)) if key else {"key": None}


def properties_fields(packed: bytes) -> dict[str, dict[str, str] | dict[str, bytes] | bytes]:
    """Return `properties` with the text properties and, if there are any, `properties_base64` with
    the bytes properties. If the properties cannot be decoded, return only the latter, with all
    bytes.
    """
    try:
        properties = unpack_properties(packed)
    except CorruptBatchError:  # the broker accepts any bytes
        return {"properties_base64": packed}
    texts = {name: value for name, value in properties.items() if isinstance(value, str)}
    binary = {name: value for name, value in properties.items() if isinstance(value, bytes)}
    return {"properties": texts, "properties_base64": binary} if binary else {"properties": texts}
