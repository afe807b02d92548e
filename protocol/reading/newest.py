"""The answer to a search for the newest message of a partition, or of one order key. Pure."""

from __future__ import annotations

from msgspec import Struct


class NewestMessage(Struct, frozen=True, kw_only=True):
    """The newest message that a search has found, without its value. `offset` is None if there is
    none at `searched_from` or above.
    """

    partition_id: int
    searched_from: int
    """The offset of the first message that was looked at; the search has a limit."""
    first_offset: int
    """The offset of the first stored message."""
    next_offset: int
    offset: int | None = None
    age_ms: int = 0
    """The time since the broker stored it, in milliseconds."""
    tags: tuple[str, ...] = ()
    acked: bool | None = None
    """True if the requested consumer group has acked it; None if no group was requested, or the
    group has not read the partition yet.
    """
