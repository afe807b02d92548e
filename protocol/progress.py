"""Setting a consumer group's progress: back to handled messages, or forward past others.  Pure.

The metaserver draws a new fencing token for each partition, so that an earlier owner is refused.  The broker first
raises the fence to this token and then sets the cursor, both durably.
"""

from __future__ import annotations

import enum
from typing import Annotated

from msgspec import Meta, Struct

from .ids import MAX_I64
from .routing import ConsumeStrategy

GROUPS_AT_ONCE_MAX = 1_024
Offset = Annotated[int, Meta(ge=0, le=MAX_I64)]
AtMs = Annotated[int, Meta(ge=0, le=MAX_I64)]
"""Milliseconds since 1970."""


class ResetTo(enum.StrEnum):
    """Where to: the first message, behind the last one, an offset, the first message at or after a time."""

    EARLIEST = "earliest"
    LATEST = "latest"
    OFFSET = "offset"
    TIME = "time"


class ResetGroup(Struct, frozen=True, kw_only=True):
    """
    Set the progress of a consumer group that has no live consumers.

    Applies to all partitions unless `queue` or `partition_id` is given.  OFFSET needs one of them: an offset names
    another message in each partition.  `partition_id` sets that partition alone, not those it continues or its children.
    """

    to: ResetTo
    offset: Offset | None = None
    """For OFFSET: a logic offset with `queue`, a physical one with `partition_id`."""
    at_ms: AtMs | None = None
    """For TIME: milliseconds since 1970, by the brokers' calendars."""
    queue: Annotated[int, Meta(ge=0, le=MAX_I64)] | None = None
    """A logic queue of a static subject."""
    partition_id: Annotated[int, Meta(ge=1, le=MAX_I64)] | None = None


class CursorView(Struct, frozen=True, kw_only=True):
    """A partition on which a group's progress was set."""

    partition_id: int
    queue: int
    cursor: int
    """The first message not acked; at the partition's end if there is none."""
    logic_cursor: int
    """The same as a logic offset."""
    token: int
    """The broker refuses lower tokens from now on."""


class GroupReset(Struct, frozen=True, kw_only=True):
    """What a reset has set, by queue and then by age."""

    subject: str
    group: str
    cursors: list[CursorView]
    left_out: tuple[int, ...] = ()
    """Partitions not set: their brokers are silent, and were given up by an evacuation."""
    static: bool = False
    """The subject has logic queues; for others `queue` and `logic_cursor` mean nothing."""


class SetCursor(Struct, frozen=True, kw_only=True):
    """Raise a group's fence to `token` and set its cursor; again with the same token changes nothing."""

    group: str
    token: Annotated[int, Meta(ge=1, le=MAX_I64)]
    cursor: Offset
    strategy: ConsumeStrategy = ConsumeStrategy.EXCLUSIVE
    """How the group consumes; the broker keeps it with the token."""


class KnowGroups(Struct, frozen=True, kw_only=True):
    """Keep messages for these groups, which have not read the partition yet."""

    groups: Annotated[tuple[str, ...], Meta(max_length=GROUPS_AT_ONCE_MAX)]
    complete: bool = False
    """The subject has no other group that is to read the partition: retention may remove what these have acked."""
