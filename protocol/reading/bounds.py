"""Bodies of the call that plans a read: where partitions begin and end, and where a time or a group
is in them.  Pure.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from ..ids import MAX_I64
from ..progress import AtMs

BOUNDS_AT_ONCE_MAX = 1_000
"""Partitions in one call; more would block the event loop of the broker too long."""


class BoundsOf(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What is asked of a partition."""

    partition_id: Annotated[int, Meta(ge=1, le=MAX_I64)]
    at_ms: Annotated[tuple[AtMs, ...], Meta(max_length=2)] = ()
    """Times to find the first message of that was stored then or later: milliseconds since 1970."""
    groups: Annotated[tuple[str, ...], Meta(max_length=2)] = ()
    """Consumer groups whose cursors are asked for."""


class AskBounds(Struct, frozen=True, kw_only=True):
    """Ask for the bounds of partitions."""

    partitions: Annotated[list[BoundsOf], Meta(max_length=BOUNDS_AT_ONCE_MAX)]


class PartitionBounds(Struct, frozen=True, kw_only=True):
    """The messages that a partition has: those of the offsets `[first_offset, next_offset)`."""

    partition_id: int
    first_offset: int
    next_offset: int
    first_at_ms: int | None = None
    """When the first of them was stored, in milliseconds since 1970; None: there is none."""
    removed_from_ms: int | None = None
    """From when on retention removes the first of them, at the earliest, in milliseconds since
    1970, unless a group or a job needs it then; None: not by its age, nor by the size of the log.
    """
    message_bytes: int = 0
    """Bytes of log that one of them takes, about: the mean of the first batch."""
    offsets_at: tuple[int | None, ...] = ()
    """For each time asked for: the first offset stored then or later; None: there is none."""
    cursors: tuple[int | None, ...] = ()
    """For each group asked for: its durable cursor; None: it has not read here."""


class BoundsList(Struct, frozen=True, kw_only=True):
    """The bounds of those partitions asked for that the broker hosts, in the order of the
    question.
    """

    broker_group: str
    partitions: list[PartitionBounds]
