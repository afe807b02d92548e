"""Packs errors into the texts of exceptions, because Spark passes on nothing else. Pure.

    KEYLANE_1160 {"details": {"offset": 5, "partition_id": 3}, "fate": "not_done"} no such offset …
    [Class 1160]

The mark, the code and the JSON are stable; `error_in` finds them in the text of Spark's exception.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager

from ..protocol.errors import Fate, KeylaneError, error_from_wire, own_hint, wire_details

_MARK = re.compile(r"KEYLANE_([0-9]{4}) (?=\{)")


@contextmanager
def readable_errors() -> Iterator[None]:
    """Put the mark before the text of every KeylaneError that is raised in the block."""
    try:
        yield
    except KeylaneError as error:
        if _MARK.match(error.message):
            raise
        raise _marked(error) from error


def _marked(error: KeylaneError) -> KeylaneError:
    facts = {"details": wire_details(error), "fate": error.fate.value}
    if hint := own_hint(error):
        facts["hint"] = hint
    line = json.dumps(facts, sort_keys=True)
    return error.copy(message=f"KEYLANE_{error.code} {line} {error.message}")


def error_in(text: str) -> KeylaneError | None:
    """Return the error in the text of an exception of Spark, or None if there is none of ours."""
    mark = _MARK.search(text)
    if mark is None:
        return None
    try:
        facts, end = json.JSONDecoder().raw_decode(text, mark.end())
        message = text[end:].partition("\n")[0].strip()
        error = error_from_wire(
            int(mark[1]),
            message.rpartition(" [")[0] or message,
            facts["details"],
            facts.get("hint", ""),
        )
        error.fate = Fate(facts["fate"])
    except (ValueError, KeyError, TypeError):
        return None
    return error
