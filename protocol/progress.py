"""A consumer group's progress on a partition, and bodies of the calls that set it, back or forward.
Pure.

The metaserver takes a new fencing token for each partition, so that an earlier owner is refused.
The broker raises the fence to this token and then sets the cursor, both durably.
"""

from __future__ import annotations

import enum
from typing import Annotated

from msgspec import Meta, Struct

from .ids import MAX_I64
from .parked.failing import FailingMessage
from .routing import ConsumeStrategy

GROUPS_AT_ONCE_MAX = 1_024
PARTITIONS_TOLD_MAX = 256
"""Partitions that one call tells of groups."""
Offset = Annotated[int, Meta(ge=0, le=MAX_I64)]
AtMs = Annotated[int, Meta(ge=0, le=MAX_I64)]
"""Milliseconds since 1970."""


class ResetTo(enum.StrEnum):
    """
    The new cursor: the first message, one past the last, an offset, or the first message at or
    after a time.

    SHIFT counts messages from the present cursor; CURSORS names one for each partition.
    """

    EARLIEST = "earliest"
    LATEST = "latest"
    OFFSET = "offset"
    TIME = "time"
    SHIFT = "shift"
    CURSORS = "cursors"


class ResetGroup(Struct, frozen=True, kw_only=True):
    """
    Set the progress of a consumer group that has no live consumers, unless it is `live`.

    All partitions are set unless `queue` or `partition_id` is given.  OFFSET needs one of them,
    because an offset names a different message in each partition.  `partition_id` sets that
    partition alone, not its parents or children.
    """

    to: ResetTo
    offset: Offset | None = None
    """For OFFSET: a logic offset with `queue`, an offset of the partition with `partition_id`."""
    at_ms: AtMs | None = None
    """For TIME: milliseconds since 1970, by the brokers' calendars."""
    queue: Annotated[int, Meta(ge=0, le=MAX_I64)] | None = None
    """A logic queue of a static subject."""
    partition_id: Annotated[int, Meta(ge=1, le=MAX_I64)] | None = None
    shift: Annotated[int, Meta(ge=-MAX_I64, le=MAX_I64)] | None = None
    """For SHIFT, with `dry_run` only: repeated it would shift again, so its plan is set as
    CURSORS.
    """
    cursors: dict[int, Offset] | None = None
    """For CURSORS: partition id → the new cursor; partitions that are not named keep theirs."""
    dry_run: bool = False
    """Answer with the new cursors; change nothing."""
    live: bool = False
    """Also with live consumers: they hand their partitions over, and go on at the new cursors."""


class PendingReset(Struct, frozen=True, kw_only=True):
    """A `live` reset that is under way: its group is granted no partition until it is done, or
    canceled.
    """

    to: ResetTo
    begun: bool
    """Its cursors may be set: it can no longer be canceled."""
    waits_for: tuple[str, ...] = ()
    """Names of the consumers that have not handed all their partitions over."""


class CursorView(Struct, frozen=True, kw_only=True):
    """A partition on which a group's progress was set."""

    partition_id: int
    queue: int
    cursor: int
    """The first message that is not acked; the partition's end if all are acked."""
    logic_cursor: int
    """The cursor as a logic offset."""
    token: int
    """The fence: the broker refuses lower tokens; 0 in a dry run."""
    before: int | None = None
    """In a dry run: the present cursor."""
    parked: int | None = None
    """
    Messages of its ancestors that stay parked here, because these were not set with it; None in a
    dry run.
    """


class GroupReset(Struct, frozen=True, kw_only=True):
    """The cursors that a reset has set, by queue and then by age."""

    subject: str
    group: str
    cursors: list[CursorView]
    left_out: tuple[int, ...] = ()
    """Partitions that were not set: an evacuation has given up their broker groups, which are
    silent.
    """
    static: bool = False
    """The subject has logic queues.  Without them `queue` and `logic_cursor` mean nothing."""
    dry_run: bool = False
    """Nothing was set: these are the cursors that the same call without `dry_run` would set."""


class CanceledReset(Struct, frozen=True, kw_only=True):
    """A reset of a group with live consumers that will not be done; nothing was changed."""

    subject: str
    group: str
    asked: ResetGroup
    """What it would have set."""


class GroupStatus(Struct, frozen=True, kw_only=True):
    """A consumer group's progress on a partition, as its broker has it."""

    group: str
    token: int
    cursor: int
    acked_above: int
    """Messages acked above the cursor."""
    lag: int
    """Messages that are not acked."""
    holder: str | None = None
    """The session that has the pull lock."""
    strategy: ConsumeStrategy = ConsumeStrategy.EXCLUSIVE
    """The consume strategy under which this token was acquired."""
    by_operator: bool = False
    """The token came with a reset of the cursor, not from a consumer."""
    ttl_ms: int = 0
    """The ttl of the session that presented the token; 0: unknown, as after a restart of the
    broker.
    """
    removed_unread: int = 0
    """Messages that retention by time removed before the group had acked them."""
    parked: int = 0
    """Messages that the group has set aside, those that wait for retry included."""
    retrying: int = 0
    """Those of them that wait for retry."""
    failing: FailingMessage | None = None
    """The oldest message that fails and is not handled; None as well when the broker has restarted
    and was not told again.
    """
    suspects: int = 0
    """Messages that two owners had when they ended without handing over, and that are not acked."""
    left_to_children: bool = False
    """Something is parked, or kept for children, which these take over once the group has drained
    the partition.
    """
    frozen: bool = False
    """Children have begun to take over what is parked: the group had drained the partition."""


class SetCursor(Struct, frozen=True, kw_only=True):
    """Raise a group's fence to `token` and set its cursor.  A repeat with the same token changes
    nothing.
    """

    group: str
    token: Annotated[int, Meta(ge=1, le=MAX_I64)]
    cursor: Offset
    strategy: ConsumeStrategy = ConsumeStrategy.EXCLUSIVE
    """The group's consume strategy; the broker stores it with the token."""
    kept_parents: tuple[int, ...] = ()
    """Ancestors that are not set with it: what was taken over of them stays parked here, and is not
    taken over again.
    """
    kept_children: tuple[tuple[int, int], ...] = ()
    """Half-open ranges of logical partitions of the children that are not set with it: they keep
    what they took over.
    """


class KnowGroups(Struct, frozen=True, kw_only=True):
    """Have retention keep messages for these groups, which have not read the partition yet."""

    groups: Annotated[tuple[str, ...], Meta(max_length=GROUPS_AT_ONCE_MAX)]
    complete: bool = False
    """No other group of the subject reads the partition: retention may remove messages that these
    groups have acked.
    """
    tokens_above: Annotated[int, Meta(ge=0, le=MAX_I64)] = 0
    """Every token of the subject's deleted groups is at most this.  A broker that has forgotten one
    of these groups under a higher token refuses the call: it was made before the deletion.
    """


class TellPartition(Struct, frozen=True, kw_only=True):
    """What one partition of several is told."""

    partition_id: Annotated[int, Meta(ge=0, le=MAX_I64)]
    know: KnowGroups


class TellGroups(Struct, frozen=True, kw_only=True):
    """Tell several partitions of a broker of consumer groups at once, each as `KnowGroups` does
    alone.
    """

    partitions: Annotated[tuple[TellPartition, ...], Meta(max_length=PARTITIONS_TOLD_MAX)]


class NotTold(Struct, frozen=True, kw_only=True):
    """A partition that was not told, and why."""

    partition_id: int
    reason: str


class ToldGroups(Struct, frozen=True, kw_only=True):
    """Each partition that is not named here knows its groups, durably."""

    not_told: tuple[NotTold, ...] = ()


class ForgetGroup(Struct, frozen=True, kw_only=True):
    """Forget a deleted group: its progress goes, and its tokens up to `token` are refused.  A
    repeat changes nothing.
    """

    group: str
    token: Annotated[int, Meta(ge=1, le=MAX_I64)]


class ForgottenGroup(Struct, frozen=True, kw_only=True):
    """The broker has forgotten the group, durably."""

    token: int
    """The highest token that it refuses; above the one of the call if the metaserver's database is
    older.
    """
