"""Formats a message as one line of JSON, which `consume` prints and `produce --json` reads."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Mapping

import msgspec

from ..protocol.http.message_json import bytes_field, properties_fields
from ..protocol.message import Message
from .screen import json_text


def message_json(message: Message, extra: Mapping[str, object] | None = None) -> str:
    """Return a message as one line of JSON: its fields by their usual names, then `extra`."""
    fields: dict[str, object] = {
        "subject": message.subject,
        "partition_id": message.partition_id,
        "offset": message.offset,
        **_json_field("key", message.key),
        **_json_field("value", message.value),
        "fencing_token": message.fencing_token,
        "lease": message.lease,
        "attempt": message.attempt,
        "sent_at_ns": message.sent_at_ns,
    }
    fields |= msgspec.to_builtins(properties_fields(message.packed_properties))
    fields |= {"queue": message.queue, "logic_offset": message.logic_offset}
    return json_text(fields | dict(extra or {}))


def shown_properties(properties: Mapping[str, str | bytes]) -> dict[str, str]:
    """Return properties as printable text; bytes are decoded as UTF-8 with escapes."""
    return {
        name: value if isinstance(value, str) else value.decode(errors="backslashreplace")
        for name, value in properties.items()
    }


def _json_field(name: str, data: bytes) -> dict[str, str]:
    return {
        field: value if isinstance(value, str) else b64encode(value).decode()
        for field, value in bytes_field(name, data).items()
    }
