"""A message as one line of JSON, as `consume` prints it; `produce --json` reads it with
`read_message`.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Mapping

import msgspec

from ..protocol.http.message_json import bytes_field, properties_fields
from ..protocol.message import Message
from .screen import json_text


def message_json(message: Message, more: Mapping[str, object] | None = None) -> str:
    """Return a message as one line of JSON, with the usual names of its fields, followed by
    `more`.
    """
    facts: dict[str, object] = {
        "subject": message.subject,
        "partition_id": message.partition_id,
        "offset": message.offset,
        **_printed("key", message.key),
        **_printed("value", message.value),
        "fencing_token": message.fencing_token,
        "lease": message.lease,
        "attempt": message.attempt,
        "sent_at_ns": message.sent_at_ns,
    }
    facts |= msgspec.to_builtins(properties_fields(message.packed_properties))
    facts |= {"queue": message.queue, "logic_offset": message.logic_offset}
    return json_text(facts | dict(more or {}))


def shown_properties(properties: Mapping[str, str | bytes]) -> dict[str, str]:
    """Return properties as texts to show; bytes become UTF-8 text with escapes."""
    return {
        name: value if isinstance(value, str) else value.decode(errors="backslashreplace")
        for name, value in properties.items()
    }


def _printed(name: str, data: bytes) -> dict[str, str]:
    return {
        field: value if isinstance(value, str) else b64encode(value).decode()
        for field, value in bytes_field(name, data).items()
    }
