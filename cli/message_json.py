"""A message as one line of JSON, as `consume` prints it; `produce --json` reads it with `read_message`."""

from __future__ import annotations

from base64 import b64encode

from ..protocol.errors import CorruptBatchError
from ..protocol.http.message_json import bytes_field
from ..protocol.message import Message
from .screen import json_text


def message_json(message: Message) -> str:
    """A message as one line of JSON, its fields named as everywhere else in JSON."""
    facts: dict[str, object] = {
        "subject": message.subject,
        "partition_id": message.partition_id,
        "offset": message.offset,
        **_printed("key", message.key),
        **_printed("value", message.value),
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


def _printed(name: str, data: bytes) -> dict[str, str]:
    return {
        field: value if isinstance(value, str) else b64encode(value).decode()
        for field, value in bytes_field(name, data).items()
    }
