"""Encodes errors in exception messages, because Spark passes nothing else on. Pure.

    KEYLANE_1160 {"details": {"offset": 5, "partition_id": 3}, "fate": "not_done"} no such offset …
    [Class 1160]

The marker, the code and the JSON are a stable format, which `parse_error` finds in the text of a
Spark exception.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager

from ..protocol.errors import Fate, KeylaneError, error_from_wire, specific_hint, wire_details

_MARKER = re.compile(r"KEYLANE_([0-9]{4}) (?=\{)")


@contextmanager
def readable_errors() -> Iterator[None]:
    """Prefix the message of each KeylaneError that is raised in the block with the marker."""
    try:
        yield
    except KeylaneError as error:
        if _MARKER.match(error.message):
            raise
        raise _add_marker(error) from error


def _add_marker(error: KeylaneError) -> KeylaneError:
    payload = {"details": wire_details(error), "fate": error.fate.value}
    if hint := specific_hint(error):
        payload["hint"] = hint
    encoded = json.dumps(payload, sort_keys=True)
    return error.copy(message=f"KEYLANE_{error.code} {encoded} {error.message}")


def parse_error(text: str) -> KeylaneError | None:
    """Return the KeylaneError encoded in the text of a Spark exception, or None."""
    marker = _MARKER.search(text)
    if marker is None:
        return None
    try:
        payload, end = json.JSONDecoder().raw_decode(text, marker.end())
        message = text[end:].partition("\n")[0].strip()
        error = error_from_wire(
            int(marker[1]),
            message.rpartition(" [")[0] or message,
            payload["details"],
            payload.get("hint", ""),
        )
        error.fate = Fate(payload["fate"])
    except (ValueError, KeyError, TypeError):
        return None
    return error
