"""Formats a message as one line, either as JSON, which `keylane produce --format json` can read, or
with a template that uses the same fields.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NotRequired, cast

from ..protocol.http.message_json import KeyField, bytes_field, key_field, properties_fields
from ..protocol.message import Lease, Message
from .options import OutputFormat
from .screen import json_text
from .template import Template


class MessageFields(KeyField):
    """A message, as JSON. The names of fields whose bytes are not text end in `_base64`."""

    subject: str
    partition_id: int
    offset: int
    value: NotRequired[str]
    value_base64: NotRequired[bytes]
    fencing_token: int
    lease: Lease | None
    attempt: int
    sent_at_ns: int
    properties: NotRequired[dict[str, str]]
    properties_base64: NotRequired[dict[str, bytes] | bytes]
    queue: int | None
    logic_offset: int | None


def message_printer(output: OutputFormat, table: str) -> Callable[[Message], str]:
    """
    Return the function that formats messages. For people, it uses the template `table`, and escapes
    control characters, because a message must not control the terminal.
    """
    if output is OutputFormat.JSON:
        return message_json
    template = output.template or Template(table)
    return lambda message: template.line(_line_fields(message))


def _line_fields(message: Message) -> MessageFields:
    """Return the fields of a message for a template. No key is an empty text, and not "-" as other
    null fields are, because `keylane produce --key-separator` may read the line.
    """
    fields = message_fields(message)
    return fields if message.key else fields | {"key": ""}


def message_fields(message: Message) -> MessageFields:
    """Return the fields of a message by their usual names. The names of fields whose bytes are not
    valid text end in `_base64`.
    """
    fields: dict[str, object] = {
        "subject": message.subject,
        "partition_id": message.partition_id,
        "offset": message.offset,
        **key_field(message.key),
        **bytes_field("value", message.value),
        "fencing_token": message.fencing_token,
        "lease": message.lease,
        "attempt": message.attempt,
        "sent_at_ns": message.sent_at_ns,
        **properties_fields(message.packed_properties),
        "queue": message.queue,
        "logic_offset": message.logic_offset,
    }
    return cast(MessageFields, fields)


def message_json(message: Message) -> str:
    """Return a message as one line of JSON."""
    return json_text(message_fields(message))


def shown_properties(properties: Mapping[str, str | bytes]) -> dict[str, str]:
    """Return properties as printable text; bytes are decoded as UTF-8 with escapes."""
    return {
        name: value if isinstance(value, str) else value.decode(errors="backslashreplace")
        for name, value in properties.items()
    }
