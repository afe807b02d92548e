"""A message as one JSON object, as `consume` prints it, `produce --json` reads it, and HTTP has it.  Pure.

    bytes that are UTF-8 text      "value": "paid"                 any others     "value_base64": "/w=="

The same goes for `key`, so the bytes of both come back.  `properties` is an object of texts.  `properties_base64` has
the stored bytes where they are no such object, as another program may write them.  It is output only: a producer sends
properties as texts, so a message with it is refused.
"""

from __future__ import annotations

from typing import Any

import msgspec

from ..errors import InvalidRequestError


class MessageObject(msgspec.Struct, forbid_unknown_fields=True):
    """A message to send; of `value` and `value_base64` exactly one, of `key` and `key_base64` at most one."""

    value: Any = msgspec.UNSET
    """A string is sent as its UTF-8 bytes, any other value as JSON."""
    value_base64: bytes | None = None
    key: str | None = None
    key_base64: bytes | None = None
    properties: dict[str, str] | None = None
    properties_base64: Any = None
    """Of a printed message; refused."""
    # Where a printed message was: of no meaning for a message that is sent.
    subject: Any = None
    partition_id: Any = None
    offset: Any = None
    fencing_token: Any = None
    attempt: Any = None
    sent_at_ns: Any = None
    queue: Any = None
    logic_offset: Any = None


KeyValueProperties = tuple[bytes, bytes, dict[str, str] | None]


def read_message(line: bytes) -> KeyValueProperties:
    """
    Key, value and properties of `{"key": …, "value": …, "properties": …}`; a value that is no string is kept as JSON.

    Raises:
        InvalidRequestError: not such an object, or one with `properties_base64`.
    """
    try:
        parsed = msgspec.json.decode(line, type=MessageObject)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequestError(f"not a message in JSON: {error}") from None
    return parts_of(parsed)


def parts_of(parsed: MessageObject) -> KeyValueProperties:
    """
    Key, value and properties of an object.

    Raises:
        InvalidRequestError: it has no value, two values or keys, or `properties_base64`.
    """
    if parsed.properties_base64 is not None:
        raise InvalidRequestError(
            "`properties_base64` cannot be sent: a producer sends properties as an object of texts; "
            "give `properties`, or leave both out to send the message without"
        )
    key = (parsed.key or "").encode()
    if parsed.key_base64 is not None:
        _check_alone("key", parsed.key)
        key = parsed.key_base64
    if parsed.value_base64 is not None:
        _check_alone("value", None if parsed.value is msgspec.UNSET else parsed)
        return key, parsed.value_base64, parsed.properties
    if parsed.value is msgspec.UNSET:
        raise InvalidRequestError("not a message in JSON: it has no `value`, nor `value_base64`")
    value = parsed.value
    packed = value.encode() if isinstance(value, str) else msgspec.json.encode(value)
    return key, packed, parsed.properties


def _check_alone(name: str, other: object) -> None:
    if other is not None:
        raise InvalidRequestError(
            f"not a message in JSON: it has both `{name}` and `{name}_base64`"
        )


def bytes_field(name: str, data: bytes) -> dict[str, str | bytes]:
    """The field `name` with `data` as text, or the field `name_base64` with the bytes."""
    try:
        return {name: data.decode()}
    except UnicodeDecodeError:
        return {f"{name}_base64": data}
