"""Bodies of the call that plans a read: first and end offsets of partitions, and the offsets of a
time or a group in them. Pure.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from ..ids import MAX_I64
from ..progress import AtMs

BOUNDS_AT_ONCE_MAX = 1_000
"""Most partitions in one call; more would block the event loop of the broker too long."""


class BoundsOf(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The question about one partition."""

    partition_id: Annotated[int, Meta(ge=1, le=MAX_I64)]
    at_ms: Annotated[tuple[AtMs, ...], Meta(max_length=2)] = ()
    """Times for which to find the first message stored at or after them: milliseconds since 1970.
    """
    groups: Annotated[tuple[str, ...], Meta(max_length=2)] = ()
    """Consumer groups whose cursors are wanted."""


class AskBounds(Struct, frozen=True, kw_only=True):
    """Ask for the bounds of partitions."""

    partitions: Annotated[list[BoundsOf], Meta(max_length=BOUNDS_AT_ONCE_MAX)]


class PartitionBounds(Struct, frozen=True, kw_only=True):
    """The messages that a partition stores: those with the offsets `[first_offset,
    next_offset)`.
    """

    partition_id: int
    first_offset: int
    next_offset: int
    first_at_ms: int | None = None
    """Time when the first of them was stored, in milliseconds since 1970; None: there is none."""
    removed_from_ms: int | None = None
    """Earliest time when retention may remove the first of them, in milliseconds since 1970, unless
    a group or a job needs it then; None: retention removes it neither by age nor by the size of the
    log.
    """
    message_bytes: int = 0
    """Approximate bytes of log for one message: the mean of the first batch."""
    offsets_at: tuple[int | None, ...] = ()
    """First offset stored at or after each wanted time; None: there is none."""
    cursors: tuple[int | None, ...] = ()
    """Durable cursor of each wanted group; None: it has not read here."""


class BoundsList(Struct, frozen=True, kw_only=True):
    """The bounds of those wanted partitions that the broker hosts, in the order of the question."""

    broker_group: str
    partitions: list[PartitionBounds]
