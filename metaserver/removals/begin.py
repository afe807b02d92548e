"""Begins the deletion of a subject or a consumer group, and reports the progress. SQL, synchronous.

Invariants
    One transaction stores the mark, ends the sessions, and journals the removals for brokers. From
    then on no session begins, no route is returned, and the group is not announced to brokers.
    A later group of the same name gets tokens above all those of the deleted one.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from ...protocol.control import (
    DeleteGroup,
    DeleteSubject,
    GroupDeletion,
    SubjectDeletion,
)
from ...protocol.errors import BusyError, GroupUnknownError, Reason, SubjectUnknownError
from ...protocol.ids import SessionId, check_name
from ...protocol.operations import OperationKind
from ...protocol.routing import PartitionState
from ...protocol.text import counted
from ..cluster.lost_database import check_not_lost
from ..cluster.removals import end_deletions, plan_removals, removals_left, was_deleted
from ..cluster.subjects import check_open, find_subject
from ..groups.sessions import end_sessions, sweep_sessions
from ..sql.duties import duty_left_ms, reset_duty
from ..sql.schema import groups, leases, operations, partitions, sessions, subjects


@dataclass(frozen=True, slots=True, kw_only=True)
class BegunDeletion:
    """A deletion that has begun, now or earlier."""

    subject_id: int
    group_id: int = 0
    ended: Collection[SessionId] = ()
    """Sessions that ended with it."""


def begin_subject_deletion(connection: Connection, name: str, ask: DeleteSubject) -> BegunDeletion:
    """
    Mark a subject as being deleted; does nothing if it is marked already, or if the subject with
    `ask.subject_id` is gone.

    Raises:
        InvalidRequestError, SubjectUnknownError, UnavailableError
        BusyError: its partitions are being changed.
        BusyError: it has live consumers and `ask.force` is not set, or a group's cursors are
            being set.
    """
    row = find_subject(connection, name, lock=True)
    known = 0 if row is None else row.subject_id
    if ask.subject_id not in {0, known} and (
        known or was_deleted(connection, name, subject_id=ask.subject_id)
    ):
        return BegunDeletion(subject_id=ask.subject_id)
    if row is None:
        check_not_lost(connection)
        raise SubjectUnknownError(subject=name)
    if row.deleting:
        end_deletions(connection)  # brokers may have nothing left
        return BegunDeletion(subject_id=row.subject_id)
    # While a target is cut, brokers are told of the hidden partitions as parents.
    target = sa.select(subjects.c.subject_id).where(subjects.c.name == row.hidden_for)
    running = sa.select(operations.c.operation_id).where(
        sa.or_(
            operations.c.running == row.subject_id,
            sa.and_(
                operations.c.running == target.scalar_subquery(),
                operations.c.kind == OperationKind.CUT,
            ),
        )
    )
    operation_id = connection.execute(running).scalar_one_or_none()
    if operation_id is not None:
        raise BusyError(Reason.OPERATION_RUNNING, subject=name, operation_id=operation_id)
    of_subject = groups.c.subject_id == row.subject_id
    locked = sa.select(groups.c.group_id).where(of_subject).order_by(groups.c.group_id)
    ids = list(connection.execute(locked.with_for_update()).scalars())
    ended = [
        session for group_id in ids for session in _live_sessions(connection, name, group_id, ask)
    ]
    end_sessions(connection, ended)
    here = subjects.c.subject_id == row.subject_id
    # Above 0: a creation that is under way ends.
    marked = {"deleting": True, "route_version": subjects.c.route_version + 1}
    connection.execute(sa.update(subjects).where(here).values(marked))
    mine = partitions.c.subject_id == row.subject_id
    # The folder of a lost partition is refused: nothing of it is served again.
    plan_removals(connection, sa.and_(mine, sa.not_(partitions.c.lost)))
    gone = {"state": PartitionState.EXPIRED}
    connection.execute(sa.update(partitions).where(mine).values(gone))
    connection.execute(sa.update(groups).where(of_subject).values(deleting=True, told=True))
    end_deletions(connection)
    return BegunDeletion(subject_id=row.subject_id, ended=ended)


def begin_group_deletion(
    connection: Connection, subject: str, group: str, ask: DeleteGroup
) -> BegunDeletion:
    """
    Mark a consumer group as being deleted; does nothing if it is marked already, or if the group
    with `ask.group_id` is gone.

    Raises:
        InvalidRequestError, SubjectUnknownError, SubjectDeletedError, GroupUnknownError
        BusyError: it has live consumers and `ask.force` is not set, or its cursors are being
            set.
    """
    row = check_open(connection, subject, find_subject(connection, subject, lock=True))
    check_name("consumer group", group)
    named = sa.and_(groups.c.subject_id == row.subject_id, groups.c.name == group)
    known = connection.execute(sa.select(groups).where(named).with_for_update()).one_or_none()
    known_id = 0 if known is None else known.group_id
    if ask.group_id not in {0, known_id} and (
        known_id or was_deleted(connection, subject, group_id=ask.group_id)
    ):
        return BegunDeletion(subject_id=row.subject_id, group_id=ask.group_id)
    if known is None:
        raise GroupUnknownError(subject=subject, group=group)
    if known.deleting:
        end_deletions(connection)  # brokers may have nothing left
        return BegunDeletion(subject_id=row.subject_id, group_id=known_id)
    ended = _live_sessions(connection, group, known_id, ask)
    end_sessions(connection, ended)
    free = sa.update(leases).where(leases.c.group_id == known_id)
    connection.execute(free.values(session=None, wanted=None, withdrawn=False))
    token = known.last_token + 1
    marked = {"deleting": True, "told": True, "last_token": token, "version": known.version + 1}
    connection.execute(sa.update(groups).where(named).values(marked))
    lower = sa.and_(subjects.c.subject_id == row.subject_id, subjects.c.tokens_above < token)
    connection.execute(sa.update(subjects).where(lower).values(tokens_above=token))
    there = sa.and_(
        partitions.c.subject_id == row.subject_id,
        partitions.c.state != PartitionState.EXPIRED,
    )
    plan_removals(connection, there, group_id=known_id, token=token)
    return BegunDeletion(subject_id=row.subject_id, group_id=known_id, ended=ended)


def _live_sessions(
    connection: Connection, name: str, group_id: int, ask: DeleteSubject | DeleteGroup
) -> list[SessionId]:
    """Return the live sessions of a locked group. Raises BusyError."""
    left_ms = duty_left_ms(connection, reset_duty(group_id))
    if left_ms:
        raise BusyError(
            Reason.GROUP_BUSY,
            f"{name!r} cannot be deleted while the cursors of a consumer group are being set",
            left_ms=left_ms,
        )
    sweep_sessions(connection, group_id)
    chosen = sa.select(sessions.c.session).where(sessions.c.group_id == group_id)
    live = [SessionId(session) for session in connection.execute(chosen).scalars()]
    if live and not ask.force:
        raise BusyError(
            Reason.GROUP_BUSY,
            f"{name!r} has {counted(len(live), 'live consumer')}: stop them, or delete it anyway "
            f"with force=True (--force)",
            sessions=len(live),
        )
    return live


def subject_deletion(connection: Connection, name: str, subject_id: int) -> SubjectDeletion:
    """Return the progress of a subject's deletion."""
    return SubjectDeletion(
        subject=name, subject_id=subject_id, left=removals_left(connection, subject_id)
    )


def group_deletion(
    connection: Connection, subject: str, group: str, begun: BegunDeletion
) -> GroupDeletion:
    """Return the progress of a consumer group's deletion."""
    return GroupDeletion(
        subject=subject,
        group=group,
        group_id=begun.group_id,
        left=removals_left(connection, begun.subject_id, begun.group_id),
    )
