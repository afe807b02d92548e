"""What a row of a job was made of, as its properties say.  Pure."""

from __future__ import annotations

from typing import Any

from ..errors import CorruptBatchError
from ..message import Message

SOURCE = "keylane.source"
"""The property that has the partition and the offset of the message that a row was made of."""


def source_of(row: Message[Any]) -> tuple[int, int] | None:
    """The partition id and the offset of the message that a row was made of; None: the row does not
    say.
    """
    try:
        text = row.properties.get(SOURCE)
    except CorruptBatchError:
        return None
    if not isinstance(text, str):
        return None
    partition_id, _, offset = text.partition("/")
    if not (_is_number(partition_id) and _is_number(offset)):
        return None
    return int(partition_id), int(offset)


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit()
