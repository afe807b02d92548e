"""Formats a message as one line, either as JSON, which `keylane produce --format json` can read, or
with a template that uses the same fields.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ..protocol.http.message_json import bytes_field, properties_fields
from ..protocol.message import Message
from .options import OutputFormat
from .screen import json_text
from .template import Template

FIELDS = (
    "subject",
    "partition_id",
    "offset",
    "key",
    "value",
    "fencing_token",
    "lease",
    "attempt",
    "sent_at_ns",
    "properties",
    "queue",
    "logic_offset",
)


def message_printer(output: OutputFormat, table: str) -> Callable[[Message], str]:
    """
    Return the function that formats messages. For people, it uses the template `table`, and escapes
    control characters, because a message must not control the terminal.

    Raises:
        ConfigError: the template in --output has a field that messages do not have.
    """
    if output is OutputFormat.JSON:
        return message_json
    template = output.template or Template(table)
    template.check(FIELDS, objects=("lease", "properties"))
    return lambda message: template.line(message_fields(message))


def message_fields(message: Message) -> dict[str, object]:
    """Return the fields of a message by their usual names. The names of fields whose bytes are not
    valid text end in `_base64`.
    """
    return {
        "subject": message.subject,
        "partition_id": message.partition_id,
        "offset": message.offset,
        **bytes_field("key", message.key),
        **bytes_field("value", message.value),
        "fencing_token": message.fencing_token,
        "lease": message.lease,
        "attempt": message.attempt,
        "sent_at_ns": message.sent_at_ns,
        **properties_fields(message.packed_properties),
        "queue": message.queue,
        "logic_offset": message.logic_offset,
    }


def message_json(message: Message) -> str:
    """Return a message as one line of JSON."""
    return json_text(message_fields(message))


def shown_properties(properties: Mapping[str, str | bytes]) -> dict[str, str]:
    """Return properties as printable text; bytes are decoded as UTF-8 with escapes."""
    return {
        name: value if isinstance(value, str) else value.decode(errors="backslashreplace")
        for name, value in properties.items()
    }
