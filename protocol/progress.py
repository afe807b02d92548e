"""A consumer group's progress on a partition, and the bodies of the calls that set it. Pure.

For a reset, the metaserver assigns a new fencing token to each partition. The broker first raises
the fence to this token, which fences earlier owners, and then sets the cursor, both durably.
"""

from __future__ import annotations

import enum
from typing import Annotated

from msgspec import Meta, Struct, field

from .ids import MAX_I64
from .parked.views import FailingMessage
from .routing import ConsumeStrategy

GROUPS_AT_ONCE_MAX = 1_024
BATCH_PARTITIONS_MAX = 256
"""Maximum number of partitions in one RegisterGroupsBatch call."""
Offset = Annotated[int, Meta(ge=0, le=MAX_I64)]
AtMs = Annotated[int, Meta(ge=0, le=MAX_I64)]
"""Milliseconds since 1970."""


class ResetTo(enum.StrEnum):
    """
    The new cursor: at the first message, one past the last message, at an offset, or at the first
    message at or after a time.

    SHIFT counts messages from the present cursor. CURSORS gives an offset for each partition.
    """

    EARLIEST = "earliest"
    LATEST = "latest"
    OFFSET = "offset"
    TIME = "time"
    SHIFT = "shift"
    CURSORS = "cursors"


class ResetGroup(Struct, frozen=True, kw_only=True):
    """
    Set the progress of a consumer group, which must have no live consumers unless `live` is set.

    All partitions are reset unless `queue` or `partition_id` is given. OFFSET needs one of them,
    because an offset refers to a different message in each partition. With `partition_id`, only
    that partition is reset, and not its parents or children.
    """

    to: ResetTo
    offset: Offset | None = None
    """With OFFSET, a logic offset if `queue` is given, or an offset of the partition if
    `partition_id` is given.
    """
    at_ms: AtMs | None = None
    """With TIME, milliseconds since 1970 by the brokers' wall clocks."""
    queue: Annotated[int, Meta(ge=0, le=MAX_I64)] | None = None
    """The number of a logic queue of a static subject."""
    partition_id: Annotated[int, Meta(ge=1, le=MAX_I64)] | None = None
    shift: Annotated[int, Meta(ge=-MAX_I64, le=MAX_I64)] | None = None
    """With SHIFT, which requires `dry_run`: a repeated call would shift again, so the plan is
    applied as CURSORS.
    """
    cursors: dict[int, Offset] | None = None
    """With CURSORS, maps partition ids to new cursors. Other partitions keep theirs."""
    dry_run: bool = False
    """True to return the new cursors without changing anything."""
    live: bool = False
    """True to reset even a group with live consumers. They hand over their partitions, and continue
    at the new cursors.
    """


class PendingReset(Struct, frozen=True, kw_only=True):
    """A `live` reset in progress. Its group receives no grants until the reset is done or
    canceled.
    """

    to: ResetTo
    begun: bool
    """True if cursors may already be set. The reset can then no longer be canceled."""
    waits_for: tuple[str, ...] = ()
    """The names of the consumers that have not handed over all their partitions."""
    asked_ms: int | None = None
    """The time since it was asked for, in milliseconds; None if not known."""


class CursorView(Struct, frozen=True, kw_only=True):
    """The new cursor of a group on one partition."""

    partition_id: int
    queue: int
    cursor: int
    """The offset of the first message that is not acked, or the partition's end if all are
    acked.
    """
    logic_cursor: int
    """The cursor as a logic offset."""
    token: int
    """The fence of the partition; 0 in a dry run. The broker refuses lower tokens."""
    before: int | None = None
    """The present cursor, in a dry run."""
    parked: int | None = None
    """The number of messages that remain parked on this partition because they come from ancestors
    that were not reset; None in a dry run.
    """


class GroupReset(Struct, frozen=True, kw_only=True):
    """The cursors that were set by a reset, ordered by queue and then by age."""

    subject: str
    group: str
    cursors: list[CursorView]
    left_out: tuple[int, ...] = ()
    """The partitions that were not reset because an evacuation has given up their silent broker
    groups.
    """
    static: bool = False
    """True if the subject has logic queues. Otherwise `queue` and `logic_cursor` have no
    meaning.
    """
    dry_run: bool = False
    """True if these cursors are only a plan."""


class CanceledReset(Struct, frozen=True, kw_only=True):
    """A reset of a group with live consumers that was canceled before it changed anything."""

    subject: str
    group: str
    asked: ResetGroup
    """The canceled request."""


class GroupStatus(Struct, frozen=True, kw_only=True):
    """A consumer group's progress on a partition, as its broker reports it."""

    group: str
    token: int
    cursor: int
    acked_above: int
    """The number of messages acked above the cursor."""
    lag: int
    """The number of messages that are not acked."""
    holder: str | None = None
    """The session that holds the pull lock."""
    strategy: ConsumeStrategy = ConsumeStrategy.EXCLUSIVE
    """The consume strategy under which this token was acquired."""
    by_operator: bool = False
    """True if the token comes from a reset of the cursor rather than from a consumer."""
    ttl_ms: int = 0
    """The ttl of the session that used the token, in milliseconds; 0 if unknown, for example after
    the broker was restarted.
    """
    removed_unread: int = 0
    """The number of messages that retention by time removed before the group had acked them."""
    parked: int = 0
    """The number of messages that the group has parked, including those that wait for a retry."""
    retrying: int = 0
    """The number of messages that wait for a retry."""
    failing: FailingMessage | None = None
    """The oldest failing message that has not been handled yet. It is also None after the broker
    was restarted, until the owner reports it again.
    """
    suspects: int = 0
    """The number of unacked messages that two successive owners were handling when they ended
    without a hand-over.
    """
    left_to_children: bool = False
    """True if the partition has parked messages that its children will adopt once the group has
    drained it.
    """
    frozen: bool = False
    """True if children have begun to adopt the parked messages, because the group has drained the
    partition.
    """
    promised_ms: int = 0
    """For how long the owner, which could not reach a metaserver, was promised that nobody else is
    let in, in milliseconds from now; 0 if it was not. Not set in a page of partitions.
    """


class SetCursor(Struct, frozen=True, kw_only=True):
    """Raise a group's fence to `token`, and set its cursor. Idempotent for the same token."""

    group: str
    token: Annotated[int, Meta(ge=1, le=MAX_I64)]
    cursor: Offset
    strategy: ConsumeStrategy = ConsumeStrategy.EXCLUSIVE
    """The consume strategy of the group, which the broker stores with the token."""
    kept_parents: tuple[int, ...] = ()
    """The ancestors that are not reset. Messages that the partition has adopted from them remain
    parked, and are not adopted again.
    """
    kept_children: tuple[tuple[int, int], ...] = ()
    """The half-open ranges of logical partitions of the children that are not reset. They keep the
    parked messages that they have adopted.
    """


class RegisterGroups(Struct, frozen=True, kw_only=True):
    """Make retention wait for these groups, which have not read the partition yet."""

    groups: Annotated[tuple[str, ...], Meta(max_length=GROUPS_AT_ONCE_MAX)]
    complete: bool = False
    """True if these are all groups of the subject. Retention may then remove messages that they
    have acked.
    """
    tokens_above: Annotated[int, Meta(ge=0, le=MAX_I64)] = 0
    """Upper bound of all tokens of the subject's deleted groups. A broker that has forgotten a
    group under a higher token refuses the call, because it predates the deletion.
    """


class PartitionGroups(Struct, frozen=True, kw_only=True):
    """The consumer groups of one partition in a RegisterGroupsBatch call."""

    partition_id: Annotated[int, Meta(ge=0, le=MAX_I64)]
    registration: RegisterGroups = field(name="know")


class RegisterGroupsBatch(Struct, frozen=True, kw_only=True):
    """Register consumer groups on several partitions of a broker: one RegisterGroups for each."""

    partitions: Annotated[tuple[PartitionGroups, ...], Meta(max_length=BATCH_PARTITIONS_MAX)]


class RefusedPartition(Struct, frozen=True, kw_only=True):
    """A partition whose groups could not be stored, and the reason."""

    partition_id: int
    reason: str


class RegisterGroupsResult(Struct, frozen=True, kw_only=True):
    """The response to RegisterGroupsBatch. Every partition that is not listed here has stored its
    groups durably.
    """

    refused_partitions: tuple[RefusedPartition, ...] = field(default=(), name="not_told")


class ForgetGroup(Struct, frozen=True, kw_only=True):
    """Forget a deleted group: its progress is removed, and its tokens up to `token` are refused.
    Idempotent.
    """

    group: str
    token: Annotated[int, Meta(ge=1, le=MAX_I64)]


class ForgottenGroup(Struct, frozen=True, kw_only=True):
    """The broker has durably forgotten the group."""

    token: int
    """The highest token that the broker refuses. It is above the requested one if the metaserver's
    database was restored.
    """
