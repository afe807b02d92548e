"""The source of a job's row, which its properties name. Pure."""

from __future__ import annotations

from typing import Any

from ..errors import CorruptBatchError
from ..message import Message

SOURCE = "keylane.source"
"""Property with the partition and the offset of the message from which a row was made."""


def source_of(row: Message[Any]) -> tuple[int, int] | None:
    """Return the partition id and the offset of the message from which a row was made; None if its
    properties do not name it.
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
