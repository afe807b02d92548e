"""Rows of resets of groups with live consumers: begun, pending, answered. SQL, synchronous.

    planned ─▶ leases withdrawn ─▶ none held ─▶ begun: tokens taken ─▶ cursors set ─▶ answered
                     │ given up, or canceled: nothing was changed

Invariants
    A group has at most one row. While it has no answer, no session of the group is granted a
    partition.
    A row that has begun is never given up or canceled: some metaserver answers it once all cursors
    are set.
    A canceled row stays until the next reset, so that a repeat of the cancellation, and a caller
    that waits for the reset, get the outcome.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
import sqlalchemy as sa
from sqlalchemy.engine import Connection

from ...protocol.errors import BusyError, ConflictError, GroupUnknownError, Reason
from ...protocol.progress import GroupReset, ResetGroup
from ..cluster.heard import mark_unsettled
from ..cluster.subjects import open_subject_row
from ..groups.views import OWNERS, find_group
from ..sql.schema import groups, live_resets, subjects

_CANCELED = ""
"""Value of the column `answer` of a canceled reset."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveReset:
    """A reset as it is now."""

    reset_id: int
    group_id: int
    subject: str
    group: str
    ask: ResetGroup
    begun: bool
    """True if cursors may be set."""
    answer: GroupReset | None
    """The new cursors, once all are set."""
    canceled: bool
    owners: tuple[str, ...]
    """Names of consumers that have not handed all their partitions over."""


_lock = (
    sa.select(groups.c.group_id)
    .where(groups.c.group_id == sa.bindparam("of_group"), sa.not_(groups.c.deleting))
    .with_for_update()
)
_of_group = sa.select(live_resets).where(live_resets.c.group_id == sa.bindparam("of_group"))
_known = (
    sa.select(live_resets, groups.c.name.label("group"), subjects.c.name.label("subject"))
    .join(groups, groups.c.group_id == live_resets.c.group_id)
    .join(subjects, subjects.c.subject_id == groups.c.subject_id)
    .where(live_resets.c.reset_id == sa.bindparam("of_reset"))
)
_pending = (
    sa.select(live_resets.c.reset_id)
    .where(live_resets.c.answer.is_(None))
    .order_by(live_resets.c.reset_id)
)


def plan_live_reset(connection: Connection, group_id: int, ask: ResetGroup) -> int:
    """
    Begin to withdraw the partitions of a group from its sessions; returns the id of the reset.

    A repeat of a pending request returns the same reset.

    Raises:
        GroupUnknownError: the group was deleted.
        BusyError: another reset of the group is pending.
    """
    if connection.execute(_lock, {"of_group": group_id}).one_or_none() is None:
        raise GroupUnknownError(f"consumer group {group_id} was deleted")
    text = msgspec.json.encode(ask).decode()
    known = connection.execute(_of_group, {"of_group": group_id}).one_or_none()
    if known is not None and known.answer is None:
        if known.ask != text:
            raise BusyError(Reason.GROUP_BUSY, "another reset of this consumer group is running")
        return int(known.reset_id)
    connection.execute(sa.delete(live_resets).where(live_resets.c.group_id == group_id))
    row = {"group_id": group_id, "ask": text}
    made = connection.execute(sa.insert(live_resets).values(row).returning(live_resets.c.reset_id))
    reset_id: int = made.scalar_one()
    mark_unsettled(connection, group_id)
    return reset_id


_same = (
    sa.select(live_resets.c.reset_id)
    .join(groups, groups.c.group_id == live_resets.c.group_id)
    .join(subjects, subjects.c.subject_id == groups.c.subject_id)
    .where(
        subjects.c.name == sa.bindparam("of_subject"),
        groups.c.name == sa.bindparam("of_name"),
        live_resets.c.ask == sa.bindparam("of_ask"),
        live_resets.c.answer.is_(None),
    )
)


def same_live_reset(connection: Connection, subject: str, group: str, ask: ResetGroup) -> int:
    """Return the id of the pending reset that this request has begun; else 0."""
    text = msgspec.json.encode(ask).decode()
    which = {"of_subject": subject, "of_name": group, "of_ask": text}
    return connection.execute(_same, which).scalar_one_or_none() or 0


def read_live_reset(connection: Connection, reset_id: int) -> LiveReset | None:
    """Return a reset; None if it was given up, if another reset followed its cancellation, or if
    its group was deleted.
    """
    row = connection.execute(_known, {"of_reset": reset_id}).one_or_none()
    if row is None:
        return None
    owners = connection.execute(OWNERS, {"of_group": row.group_id}).scalars()
    return LiveReset(
        reset_id=row.reset_id,
        group_id=row.group_id,
        subject=row.subject,
        group=row.group,
        ask=msgspec.json.decode(row.ask, type=ResetGroup),
        begun=row.begun,
        answer=msgspec.json.decode(row.answer, type=GroupReset) if row.answer else None,
        canceled=row.answer == _CANCELED,
        owners=tuple(owners),
    )


def pending_live_resets(connection: Connection) -> list[int]:
    """Return the ids of the resets without an answer."""
    return list(connection.execute(_pending).scalars())


def give_up_live_reset(connection: Connection, reset_id: int, group_id: int) -> bool:
    """Delete a reset, so that the group's sessions are granted partitions again; returns False if
    it has begun or is answered.
    """
    connection.execute(_lock, {"of_group": group_id})
    here = sa.and_(
        live_resets.c.reset_id == reset_id,
        sa.not_(live_resets.c.begun),
        live_resets.c.answer.is_(None),
    )
    given_up = connection.execute(sa.delete(live_resets).where(here)).rowcount == 1
    mark_unsettled(connection, group_id)
    return given_up


def cancel_live_reset(connection: Connection, subject: str, group: str) -> tuple[int, ResetGroup]:
    """
    Cancel the reset that waits for a group's sessions, which are granted partitions again.

    Returns:
        The id of the group, and the request of the reset.

    Raises:
        InvalidRequestError, SubjectUnknownError, GroupUnknownError
        ConflictError: some or all cursors may be set, or the group has no reset.
    """
    subject_id = open_subject_row(connection, subject).subject_id
    group_id, _ = find_group(connection, subject_id, subject, group)
    connection.execute(_lock, {"of_group": group_id})
    row = connection.execute(_of_group, {"of_group": group_id}).one_or_none()
    if row is None:
        raise ConflictError(
            Reason.RESET_FORWARD, f"group {group!r} has no reset", subject=subject, group=group
        )
    if row.answer:
        raise ConflictError(
            Reason.RESET_FORWARD,
            f"the reset of group {group!r} is done",
            subject=subject,
            group=group,
        )
    if row.begun:
        error = ConflictError(
            Reason.RESET_FORWARD,
            f"the reset of group {group!r} has begun to set cursors",
            subject=subject,
            group=group,
            begun=True,
        )
        error.hint = (
            "It continues by itself, and the group is granted nothing before it is done; then "
            "reset the group to where it was."
        )
        raise error
    canceled = sa.update(live_resets).where(live_resets.c.reset_id == row.reset_id)
    connection.execute(canceled.values(answer=_CANCELED))
    mark_unsettled(connection, group_id)
    return group_id, msgspec.json.decode(row.ask, type=ResetGroup)
