"""Begins the deletion of a subject or a consumer group, and reports its progress. Runs SQL
synchronously.

Invariants
    A single transaction stores the mark, ends the sessions, and journals the removals for brokers.
    After it, no session begins, no route is returned, and the group is not announced to brokers.
    A later group with the same name gets higher tokens than the deleted group had.
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
from ..cluster.lost_database import check_database_complete
from ..cluster.removals import count_removals, finish_deletions, plan_removals, was_deleted
from ..cluster.subjects import check_open, find_subject
from ..groups.sessions import end_expired_sessions, end_sessions
from ..sql.duties import duty_left_ms, reset_duty
from ..sql.schema import groups, leases, operations, partitions, sessions, subjects


@dataclass(frozen=True, slots=True, kw_only=True)
class BegunDeletion:
    """A deletion begun by this call or by an earlier one."""

    subject_id: int
    group_id: int = 0
    ended_sessions: Collection[SessionId] = ()
    """Sessions that this call ended."""


def begin_subject_deletion(
    connection: Connection, name: str, request: DeleteSubject
) -> BegunDeletion:
    """
    Mark a subject as being deleted. Does nothing if it is already marked, or if the subject with
    the id `request.subject_id` no longer exists.

    Raises:
        InvalidRequestError, SubjectUnknownError, UnavailableError
        BusyError: its partitions are being changed, a group's cursors are being set, or it has
            live consumers and `request.force` is not set.
    """
    row = find_subject(connection, name, lock=True)
    current_id = 0 if row is None else row.subject_id
    if request.subject_id not in {0, current_id} and (
        current_id or was_deleted(connection, name, subject_id=request.subject_id)
    ):
        return BegunDeletion(subject_id=request.subject_id)
    if row is None:
        check_database_complete(connection)
        raise SubjectUnknownError(subject=name)
    if row.deleting:
        finish_deletions(connection)  # brokers may have nothing left
        return BegunDeletion(subject_id=row.subject_id)
    # While a target is being cut, its brokers are sent the hidden partitions as parents.
    target = sa.select(subjects.c.subject_id).where(subjects.c.name == row.hidden_for)
    unfinished_query = sa.select(operations.c.operation_id).where(
        sa.or_(
            operations.c.running == row.subject_id,
            sa.and_(
                operations.c.running == target.scalar_subquery(),
                operations.c.kind == OperationKind.CUT,
            ),
        )
    )
    operation_id = connection.execute(unfinished_query).scalar_one_or_none()
    if operation_id is not None:
        raise BusyError(Reason.OPERATION_RUNNING, subject=name, operation_id=operation_id)
    is_group = groups.c.subject_id == row.subject_id
    group_ids = sa.select(groups.c.group_id).where(is_group).order_by(groups.c.group_id)
    locked_ids = list(connection.execute(group_ids.with_for_update()).scalars())
    ended_sessions = [
        session
        for group_id in locked_ids
        for session in _read_live_sessions(connection, name, group_id, request)
    ]
    end_sessions(connection, ended_sessions)
    this_subject = subjects.c.subject_id == row.subject_id
    # A version above 0 also ends a creation in progress.
    deletion_columns = {"deleting": True, "route_version": subjects.c.route_version + 1}
    connection.execute(sa.update(subjects).where(this_subject).values(deletion_columns))
    is_partition = partitions.c.subject_id == row.subject_id
    # The data folder of a lost partition is refused, so it will never serve the partition again.
    plan_removals(connection, sa.and_(is_partition, sa.not_(partitions.c.lost)))
    expired_column = {"state": PartitionState.EXPIRED}
    connection.execute(sa.update(partitions).where(is_partition).values(expired_column))
    connection.execute(sa.update(groups).where(is_group).values(deleting=True, told=True))
    finish_deletions(connection)
    return BegunDeletion(subject_id=row.subject_id, ended_sessions=ended_sessions)


def begin_group_deletion(
    connection: Connection, subject: str, group: str, request: DeleteGroup
) -> BegunDeletion:
    """
    Mark a consumer group as being deleted. Does nothing if it is already marked, or if the group
    with the id `request.group_id` no longer exists.

    Raises:
        InvalidRequestError, SubjectUnknownError, SubjectDeletedError, GroupUnknownError
        BusyError: its cursors are being set, or it has live consumers and `request.force` is not
            set.
    """
    row = check_open(connection, subject, find_subject(connection, subject, lock=True))
    check_name("consumer group", group)
    this_group = sa.and_(groups.c.subject_id == row.subject_id, groups.c.name == group)
    group_row = connection.execute(
        sa.select(groups).where(this_group).with_for_update()
    ).one_or_none()
    group_id = 0 if group_row is None else group_row.group_id
    if request.group_id not in {0, group_id} and (
        group_id or was_deleted(connection, subject, group_id=request.group_id)
    ):
        return BegunDeletion(subject_id=row.subject_id, group_id=request.group_id)
    if group_row is None:
        raise GroupUnknownError(subject=subject, group=group)
    if group_row.deleting:
        finish_deletions(connection)  # brokers may have nothing left
        return BegunDeletion(subject_id=row.subject_id, group_id=group_id)
    ended_sessions = _read_live_sessions(connection, group, group_id, request)
    end_sessions(connection, ended_sessions)
    free_leases = sa.update(leases).where(leases.c.group_id == group_id)
    connection.execute(free_leases.values(session=None, wanted=None, withdrawn=False))
    token = group_row.last_token + 1
    deletion_columns = {
        "deleting": True,
        "told": True,
        "last_token": token,
        "version": group_row.version + 1,
    }
    connection.execute(sa.update(groups).where(this_group).values(deletion_columns))
    has_lower_floor = sa.and_(
        subjects.c.subject_id == row.subject_id, subjects.c.tokens_above < token
    )
    connection.execute(sa.update(subjects).where(has_lower_floor).values(tokens_above=token))
    has_data = sa.and_(
        partitions.c.subject_id == row.subject_id,
        partitions.c.state != PartitionState.EXPIRED,
    )
    plan_removals(connection, has_data, group_id=group_id, token=token)
    return BegunDeletion(
        subject_id=row.subject_id, group_id=group_id, ended_sessions=ended_sessions
    )


def _read_live_sessions(
    connection: Connection, name: str, group_id: int, request: DeleteSubject | DeleteGroup
) -> list[SessionId]:
    """
    Return the live sessions of a locked group.

    Raises:
        BusyError: cursors are being set, or there are live sessions and `request.force` is not set.
    """
    remaining_ms = duty_left_ms(connection, reset_duty(group_id))
    if remaining_ms:
        raise BusyError(
            Reason.GROUP_BUSY,
            f"{name!r} cannot be deleted while the cursors of a consumer group are being set",
            left_ms=remaining_ms,
        )
    end_expired_sessions(connection, group_id)
    query = sa.select(sessions.c.session).where(sessions.c.group_id == group_id)
    live_ids = [SessionId(session) for session in connection.execute(query).scalars()]
    if live_ids and not request.force:
        raise BusyError(
            Reason.GROUP_BUSY,
            f"{name!r} has {counted(len(live_ids), 'live consumer')}: stop them, or delete it "
            f"anyway with force=True (--force)",
            sessions=len(live_ids),
        )
    return live_ids


def subject_deletion(connection: Connection, name: str, subject_id: int) -> SubjectDeletion:
    """Return the progress of a subject's deletion."""
    return SubjectDeletion(
        subject=name, subject_id=subject_id, left=count_removals(connection, subject_id)
    )


def group_deletion(
    connection: Connection, subject: str, group: str, begun: BegunDeletion
) -> GroupDeletion:
    """Return the progress of a consumer group's deletion."""
    return GroupDeletion(
        subject=subject,
        group=group,
        group_id=begun.group_id,
        left=count_removals(connection, begun.subject_id, begun.group_id),
    )
