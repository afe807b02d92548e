"""Publishes hidden subjects: gives their partitions to their targets. Runs SQL synchronously.

    no target     One transaction gives the hidden subject the target's name.
    a target      An operation seals the target's open partitions. Then one transaction changes the
                  route: the hidden partitions, which are children of the sealed ones, are open;
                  with `replaces`, all older ones expire.
    a cut         An operation seals the hidden partitions. Then one transaction changes the route:
                  the hidden partitions are readable, the older ones, which the cut has sealed,
                  expire, and the open ones, which continue both, stay as they are.

Invariants
    A publication is journaled together with its changes, so that repeating it has no effect.
    Without a cut, a publication is refused unless the target's open partitions are the parents with
    which the hidden partitions are hosted. With a cut, any operation may come in between, because
    the cut has sealed the partitions that are replaced.
    With a cut, no message is deleted that the caller does not know about: the publication compares
    end offsets, and the end offset of a sealed partition never changes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from ...protocol.errors import (
    BusyError,
    InvalidRequestError,
    PublishError,
    Reason,
    SubjectDeletedError,
    SubjectUnknownError,
)
from ...protocol.ids import check_name
from ...protocol.operations import OperationKind, OperationState, PublishSubject, StepAction
from ...protocol.routing import PartitionState
from ...protocol.text import counted
from ..cluster.lost_database import check_database_complete
from ..cluster.removals import being_deleted_error
from ..cluster.rows import SubjectRow
from ..cluster.subjects import check_open, find_subject
from ..groups.sessions import end_expired_sessions
from ..groups.views import build_revision
from ..sql.dialect import now_ms
from ..sql.duties import duty_left_ms, reset_duty
from ..sql.schema import (
    groups,
    operations,
    partitions,
    publications,
    sessions,
    starts,
    steps,
    subjects,
)
from .cuts import check_continues_target, check_cut, find_cut, outdated_error, read_parents


def begin_publication(
    connection: Connection,
    hidden_subject: str,
    request: PublishSubject,
    *,
    driver: str,
    lease_ms: int,
) -> int:
    """
    Publish a hidden subject, or begin the operation that publishes it. Repeating the call has no
    effect.

    Returns:
        The id of the operation, which is leased to `driver`; 0 if there was no target, so that the
        publication is already done.

    Raises:
        InvalidRequestError, SubjectUnknownError, SubjectDeletedError, UnavailableError
        PublishError: the subject is not hidden or was created for another target, or the target has
            been created, deleted or changed since. If the target is to be replaced: one of its
            groups has no position or has changed since its cursors were read, or the target has
            messages that the hidden subject lacks.
        BusyError: the target's partitions are being changed, or it is to be replaced and one of its
            groups has live consumers.
    """
    check_name("subject", request.target)
    published_id = _find_publication(connection, hidden_subject, request)
    if published_id is not None:
        return published_id
    rows = {
        name: find_subject(connection, name, lock=True)
        for name in sorted({hidden_subject, request.target})
    }
    # Check again: another transaction may have held the locks.
    published_id = _find_publication(connection, hidden_subject, request)
    if published_id is not None:
        return published_id
    row, target = rows[hidden_subject], rows[request.target]
    row = _check_hidden(connection, hidden_subject, row, request)
    parents = read_parents(connection, row)
    if target is None:
        # More names than partitions: the subject was made for a target, whose names it counts.
        if row.partitions_named > len(parents):
            raise outdated_error(row, "its target was deleted")
        _rename_to_target(connection, row, request.target)
        operation_id = 0
    else:
        check_open(connection, request.target, target)
        planned_steps = _plan_steps(connection, row, target, request, parents)
        operation_id = _journal_publication(
            connection, row, target, request, planned_steps, driver=driver, lease_ms=lease_ms
        )
        if request.replace:
            _move_groups(connection, target, request, list(parents))
    connection.execute(
        sa.insert(publications).values(
            hidden=hidden_subject,
            target=request.target,
            operation_id=operation_id,
            replaces=request.replace,
            subject_id=row.subject_id,
        )
    )
    return operation_id


def _rename_to_target(connection: Connection, row: SubjectRow, target: str) -> None:
    """Give the hidden subject the name of its target, which does not exist."""
    values = {
        "name": target,
        "hidden_for": "",
        "hidden_since": None,
        "filled_by": "",
        "route_version": row.route_version + 1,
    }
    this_subject = subjects.c.subject_id == row.subject_id
    connection.execute(sa.update(subjects).where(this_subject).values(**values))


def _find_publication(
    connection: Connection, hidden_subject: str, request: PublishSubject
) -> int | None:
    """
    Return the operation id of an earlier publication, in the same form as `begin_publication`; None
    if there is none.

    Raises:
        PublishError: it was published in another target, or in another way.
        SubjectDeletedError
    """
    query = sa.select(publications).where(publications.c.hidden == hidden_subject)
    publication = connection.execute(query).one_or_none()
    if publication is None:
        return None
    if (publication.target, publication.replaces) != (request.target, request.replace):
        replacement_text = ", replacing it" if publication.replaces else ""
        raise PublishError(
            Reason.PUBLISH_TARGET,
            f"{hidden_subject!r} was published in {publication.target!r}{replacement_text}",
            subject=hidden_subject,
            target=request.target,
        )
    _check_subject_id(hidden_subject, publication.subject_id, request)
    return int(publication.operation_id)


def _check_subject_id(hidden_subject: str, subject_id: int, request: PublishSubject) -> None:
    """Check that the request refers to this subject, and not to an earlier one with the same name.
    Raises SubjectDeletedError.
    """
    if request.subject_id and request.subject_id != subject_id:
        raise SubjectDeletedError(
            f"hidden subject {hidden_subject!r} with id {request.subject_id} was deleted; a later "
            "subject of the same name is not published in its place",
            subject=hidden_subject,
        )


def _check_hidden(
    connection: Connection, hidden_subject: str, row: SubjectRow | None, request: PublishSubject
) -> SubjectRow:
    """Return the row if it belongs to a hidden subject that can be published in the target. Raises
    the same errors as `begin_publication`.
    """
    if row is None:
        check_database_complete(connection)
        raise SubjectUnknownError(subject=hidden_subject)
    if row.deleting:
        raise being_deleted_error(connection, row.subject_id, hidden_subject)
    _check_subject_id(hidden_subject, row.subject_id, request)
    if not row.hidden_for:
        raise PublishError(
            Reason.PUBLISH_TARGET,
            f"subject {hidden_subject!r} is not hidden",
            subject=hidden_subject,
            target=request.target,
        )
    if row.hidden_for != request.target:
        raise PublishError(
            Reason.PUBLISH_TARGET,
            f"{hidden_subject!r} was made for {row.hidden_for!r}",
            subject=hidden_subject,
            target=request.target,
        )
    if row.route_version == 0:
        raise SubjectUnknownError(
            f"the creation of {hidden_subject!r} is not finished yet", subject=hidden_subject
        )
    return row


def _plan_steps(
    connection: Connection,
    row: SubjectRow,
    target: SubjectRow,
    request: PublishSubject,
    parents: Mapping[int, set[int]],
) -> list[tuple[int, StepAction, bool]]:
    """Return (partition id, action, done) for each step of a publication. Raises the same errors as
    `begin_publication`.
    """
    cut = find_cut(connection, list(parents))
    if cut is not None:
        check_cut(connection, row, target, request, cut, parents)
        return [(hidden_id, StepAction.SEAL, False) for hidden_id in parents]
    if request.ends is not None:
        raise PublishError(
            Reason.PUBLISH_TARGET,
            f"{row.name!r} was made without a cut: messages sent since then would be "
            "deleted unread; delete it, and reprocess the subject into itself again",
            subject=row.name,
            target=target.name,
        )
    check_continues_target(connection, row, target, parents)
    host_steps = [(child, StepAction.HOST, True) for child in parents]
    parent_ids = sorted(set().union(*parents.values()))
    return host_steps + [(parent, StepAction.SEAL, False) for parent in parent_ids]


def _journal_publication(
    connection: Connection,
    row: SubjectRow,
    target: SubjectRow,
    request: PublishSubject,
    planned_steps: Sequence[tuple[int, StepAction, bool]],
    *,
    driver: str,
    lease_ms: int,
) -> int:
    """Journal the operation and give the hidden subject's partitions to the target. Brokers already
    host them; they become visible when the operation is done.
    """
    operation_id: int = connection.execute(
        sa.insert(operations)
        .values(
            subject_id=target.subject_id,
            kind=OperationKind.PUBLISH,
            state=OperationState.PLAN,
            without_source=False,
            problem="",
            running=target.subject_id,
            driver=driver,
            driven_until=now_ms() + lease_ms,
            replaces=request.replace,
        )
        .returning(operations.c.operation_id)
    ).scalar_one()
    connection.execute(
        sa.insert(steps),
        [
            {
                "operation_id": operation_id,
                "partition_id": partition_id,
                "action": action,
                "done": done,
                "given_up": False,
            }
            for partition_id, action, done in planned_steps
        ],
    )
    connection.execute(
        sa.update(partitions)
        .where(partitions.c.subject_id == row.subject_id)
        .values(subject_id=target.subject_id, state=PartitionState.PLANNED)
    )
    connection.execute(sa.delete(subjects).where(subjects.c.subject_id == row.subject_id))
    return operation_id


# ── groups of a subject that is replaced ──────────────────────────────────────────────────────────
def _move_groups(
    connection: Connection, target: SubjectRow, request: PublishSubject, children: list[int]
) -> None:
    """
    Store where the target's groups continue in the new partitions. Brokers treat these positions
    like the starts of new groups.

    Raises:
        InvalidRequestError: a position belongs to another partition.
        PublishError: a group has no position, or has changed since its cursors were read.
        BusyError: a group has live consumers, or its cursors are being set.
    """
    is_in_target = sa.and_(groups.c.subject_id == target.subject_id, sa.not_(groups.c.deleting))
    group_rows = connection.execute(
        sa.select(groups).where(is_in_target).order_by(groups.c.group_id).with_for_update()
    ).all()
    missing_groups = sorted({group.name for group in group_rows} - set(request.starts))
    if missing_groups:
        raise PublishError(
            Reason.PUBLISH_GROUPS,
            f"{counted(len(missing_groups), 'consumer group')} of {target.name!r} would have no "
            f"position: {', '.join(missing_groups[:10])}",
            subject=target.name,
            groups=", ".join(missing_groups),
        )
    for group in group_rows:
        _check_group_idle(connection, group.group_id, group.name)
        revision = request.revisions.get(group.name)
        if revision and revision != build_revision(group.group_id, group.version, group.last_token):
            raise PublishError(
                Reason.PUBLISH_CURSORS,
                f"consumer group {group.name!r} was reset, or had a consumer, since its cursors "
                f"were read",
                subject=target.name,
                group=group.name,
            )
        cursors = request.starts[group.name]
        if set(cursors) != set(children):
            raise InvalidRequestError(
                f"group {group.name!r} needs a position in each of these partitions: "
                f"{sorted(children)}"
            )
        rows = [
            {
                "group_id": group.group_id,
                "partition_id": child,
                "cursor": cursors[child],
                "token": group.last_token + number,
            }
            for number, child in enumerate(sorted(children), 1)
        ]
        connection.execute(sa.insert(starts), rows)
        values = {"last_token": group.last_token + len(rows), "told": False, "settled": False}
        this_group = groups.c.group_id == group.group_id
        connection.execute(
            sa.update(groups).where(this_group).values(version=groups.c.version + 1, **values)
        )


def _check_group_idle(connection: Connection, group_id: int, name: str) -> None:
    """Check that a group has no live consumer, and that its cursors are not being set. Raises
    BusyError.
    """
    reset_remaining_ms = duty_left_ms(connection, reset_duty(group_id))
    end_expired_sessions(connection, group_id)
    live_count = connection.execute(
        sa.select(sa.func.count()).where(sessions.c.group_id == group_id)
    ).scalar_one()
    if live_count or reset_remaining_ms:
        problem = (
            "its progress is being set"
            if reset_remaining_ms
            else f"it has {counted(live_count, 'live consumer')}"
        )
        raise BusyError(
            Reason.GROUP_BUSY,
            f"consumer group {name!r} must not be running when it is carried over, and {problem}: "
            "stop it, publish, and start it again",
            sessions=live_count,
        )
