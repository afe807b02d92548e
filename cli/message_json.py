"""A message as one JSON object: what `consume` prints and `produce --json` reads.

    bytes that are UTF-8 text      "value": "paid"                 any others     "value_base64": "/w=="

The same goes for `key`, so the bytes of both come back.  `properties` is an object of texts.  `properties_base64` has
the stored bytes where they are no such object, as another program may write them.  It is printed only: a producer sends
properties as texts, so `read_message` refuses a line with it.
"""

from __future__ import annotations

from base64 import b64encode

import msgspec

from ..protocol.errors import CorruptBatchError, InvalidRequestError
from ..protocol.message import Message
from .screen import json_text


class _Line(msgspec.Struct, forbid_unknown_fields=True):
    value: object = msgspec.UNSET
    value_base64: bytes | None = None
    key: str | None = None
    key_base64: bytes | None = None
    properties: dict[str, str] | None = None
    properties_base64: object = None
    """Of a printed message; refused."""
    # Where a printed message was: said by `consume`, and of no meaning for a message that is sent.
    subject: object = None
    partition_id: object = None
    offset: object = None
    fencing_token: object = None
    attempt: object = None
    sent_at_ns: object = None
    queue: object = None
    logic_offset: object = None


def message_json(message: Message) -> str:
    """A message as one line of JSON, its fields named as everywhere else in JSON."""
    facts: dict[str, object] = {
        "subject": message.subject,
        "partition_id": message.partition_id,
        "offset": message.offset,
        **_bytes("key", message.key),
        **_bytes("value", message.value),
        "fencing_token": message.fencing_token,
        "attempt": message.attempt,
        "sent_at_ns": message.sent_at_ns,
    }
    try:
        facts["properties"] = dict(message.properties)
    except CorruptBatchError:  # the broker takes any bytes
        facts["properties_base64"] = b64encode(message.packed_properties).decode()
    facts |= {"queue": message.queue, "logic_offset": message.logic_offset}
    return json_text(facts)


def read_message(line: bytes) -> tuple[bytes, bytes, dict[str, str] | None]:
    """
    Key, value and properties of `{"key": …, "value": …, "properties": …}`; a value that is no string is kept as JSON.

    Raises:
        InvalidRequestError: not such an object, or one with `properties_base64`.
    """
    try:
        parsed = msgspec.json.decode(line, type=_Line)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise InvalidRequestError(f"not a message in JSON: {error}") from None
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


def _bytes(name: str, data: bytes) -> dict[str, str]:
    try:
        return {name: data.decode()}
    except UnicodeDecodeError:
        return {f"{name}_base64": b64encode(data).decode()}
