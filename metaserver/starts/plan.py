"""The first offset of each partition that a new consumer group reads.  Pure."""

from __future__ import annotations

from collections.abc import Sequence

from ...protocol.errors import InvalidRequestError
from ...protocol.groups import GroupStart, StartAt
from ...protocol.progress import ResetGroup, ResetTo
from ..resets.cursors import PartitionOffsets, new_cursors


def check_start(start: GroupStart) -> None:
    """Raise InvalidRequestError unless a time goes with TIME, and only with it."""
    if (start.at is StartAt.TIME) != (start.at_ms is not None):
        raise InvalidRequestError("at_ms goes with at = time, and only with it")


def start_cursors(
    start: GroupStart, parts: Sequence[PartitionOffsets], *, static: bool
) -> dict[int, int]:
    """
    Return partition id → first offset that the group reads; empty: each partition from its first message.

    A group whose tokens brokers have seen is none of the new ones: the database lost it.  It goes on where it was.
    """
    if start.at is StartAt.EARLIEST or any(part.fence for part in parts):
        return {}
    ask = ResetGroup(to=ResetTo(start.at.value), at_ms=start.at_ms)
    return new_cursors(ask, parts, static=static)
