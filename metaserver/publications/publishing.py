"""Publishes hidden subjects: their partitions become their target's.  SQL, synchronous.

    no target     the hidden subject takes the name, in this one transaction
    a target      an operation seals its open partitions, then one transaction changes the route: the partitions of the hidden
                  subject, which are children of the sealed ones, are open; with `replaces`, all older ones expire

Invariants
    A publication is journaled with what it changes: a repeat finds it, and changes nothing.
    The open partitions of the target are the parents with which the hidden subject's partitions are hosted; else it is
    refused.
"""

from __future__ import annotations

from collections.abc import Mapping

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from ...protocol.errors import (
    GroupBusyError,
    InvalidRequestError,
    OperationRunningError,
    PublishGroupsError,
    PublishOutdatedError,
    PublishTargetError,
    SubjectUnknownError,
)
from ...protocol.ids import check_name
from ...protocol.operations import OperationKind, OperationState, PublishSubject, StepAction
from ...protocol.routing import PartitionState
from ...protocol.text import counted
from ..cluster.lost_database import check_not_lost
from ..cluster.removals import being_deleted
from ..cluster.rows import SubjectRow
from ..cluster.subjects import check_not_hidden, check_open, find_subject
from ..groups.sessions import sweep_sessions
from ..operations.plan_inputs import open_partitions, running_operation
from ..sql.dialect import now_ms
from ..sql.duties import duty_left_ms, reset_duty
from ..sql.schema import (
    groups,
    operations,
    partition_parents,
    partitions,
    publications,
    sessions,
    starts,
    steps,
    subjects,
)


def begin_publication(
    connection: Connection, hidden: str, ask: PublishSubject, *, driver: str, lease_ms: int
) -> int:
    """
    Publish a hidden subject, or begin the operation that does; a repeat changes nothing.

    Returns:
        The id of the operation, leased to `driver`; 0 if there was no target, and all is done.

    Raises:
        InvalidNameError, InvalidRequestError, SubjectUnknownError, SubjectDeletedError, DatabaseEmptyError
        PublishTargetError: the subject is not hidden, or was made for another target.
        PublishOutdatedError: the target's partitions have changed, or there is a target now, or none any more.
        OperationRunningError: the target's partitions are being changed.
        PublishGroupsError, GroupBusyError: the target is to be replaced, and a group has no position or live consumers.
    """
    check_name("subject", ask.target)
    known = _published(connection, hidden, ask)
    if known is not None:
        return known
    rows = {
        name: find_subject(connection, name, lock=True) for name in sorted({hidden, ask.target})
    }
    known = _published(connection, hidden, ask)  # another transaction may have held the locks
    if known is not None:
        return known
    row, target = rows[hidden], rows[ask.target]
    row = _check_hidden(connection, hidden, row, ask)
    parents = _parents_of(connection, row)
    if target is None:
        # A subject made beside a target counts the target's names too; the lineage goes with the target.
        if row.partitions_named > len(parents):
            raise _outdated(row, "its target was deleted")
        taken = {
            "name": ask.target,
            "hidden_for": "",
            "hidden_since": None,
            "route_version": row.route_version + 1,
        }
        here = subjects.c.subject_id == row.subject_id
        connection.execute(sa.update(subjects).where(here).values(**taken))
        operation_id = 0
    else:
        check_open(connection, ask.target, target)
        _check_continues(connection, row, target, parents)
        operation_id = _journal(
            connection, row, target, ask, parents, driver=driver, lease_ms=lease_ms
        )
        if ask.replace:
            _place_groups(connection, target, ask, list(parents))
    connection.execute(
        sa.insert(publications).values(
            hidden=hidden, target=ask.target, operation_id=operation_id, replaces=ask.replace
        )
    )
    return operation_id


def _published(connection: Connection, hidden: str, ask: PublishSubject) -> int | None:
    chosen = sa.select(publications).where(publications.c.hidden == hidden)
    known = connection.execute(chosen).one_or_none()
    if known is None:
        return None
    if (known.target, known.replaces) != (ask.target, ask.replace):
        how = ", replacing it" if known.replaces else ""
        raise PublishTargetError(
            f"{hidden!r} was published in {known.target!r}{how}", subject=hidden, target=ask.target
        )
    return int(known.operation_id)


def _check_hidden(
    connection: Connection, hidden: str, row: SubjectRow | None, ask: PublishSubject
) -> SubjectRow:
    if row is None:
        check_not_lost(connection)
        raise SubjectUnknownError(subject=hidden)
    if row.deleting:
        raise being_deleted(connection, row.subject_id, hidden)
    if not row.hidden_for:
        raise PublishTargetError(
            f"subject {hidden!r} is not hidden", subject=hidden, target=ask.target
        )
    if row.hidden_for != ask.target:
        raise PublishTargetError(
            f"{hidden!r} was made for {row.hidden_for!r}", subject=hidden, target=ask.target
        )
    if row.route_version == 0:
        raise SubjectUnknownError(f"{hidden!r} is not created to its end yet", subject=hidden)
    return row


def _parents_of(connection: Connection, row: SubjectRow) -> dict[int, set[int]]:
    """Partition id → its parents, for the open partitions of a hidden subject."""
    ids = [partition.partition_id for partition in open_partitions(connection, row)]
    parents: dict[int, set[int]] = {partition_id: set() for partition_id in ids}
    chosen = sa.select(partition_parents).where(partition_parents.c.partition_id.in_(ids))
    for line in connection.execute(chosen):
        parents[line.partition_id].add(line.parent_id)
    return parents


def _check_continues(
    connection: Connection, row: SubjectRow, target: SubjectRow, parents: Mapping[int, set[int]]
) -> None:
    """Raises OperationRunningError, PublishOutdatedError."""
    check_not_hidden(target)
    running = running_operation(connection, target.subject_id)
    if running is not None:
        raise OperationRunningError(subject=target.name, operation_id=running)
    now = {partition.partition_id for partition in open_partitions(connection, target)}
    if now != set().union(*parents.values()):
        raise _outdated(
            row,
            "its partitions were resized, moved or set"
            if any(parents.values())
            else "a subject of this name was created",
        )


def _outdated(row: SubjectRow, what: str) -> PublishOutdatedError:
    return PublishOutdatedError(
        f"{row.name!r} cannot be published in {row.hidden_for!r}: {what} since it was made",
        subject=row.name,
        target=row.hidden_for,
    )


def _journal(
    connection: Connection,
    row: SubjectRow,
    target: SubjectRow,
    ask: PublishSubject,
    parents: Mapping[int, set[int]],
    *,
    driver: str,
    lease_ms: int,
) -> int:
    """Give the target the hidden subject's partitions, as children of an operation that are hosted already."""
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
            replaces=ask.replace,
        )
        .returning(operations.c.operation_id)
    ).scalar_one()
    todo = [(child, StepAction.HOST, True) for child in parents]
    todo += [(parent, StepAction.SEAL, False) for parent in sorted(set().union(*parents.values()))]
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
            for partition_id, action, done in todo
        ],
    )
    connection.execute(
        sa.update(partitions)
        .where(partitions.c.subject_id == row.subject_id)
        .values(subject_id=target.subject_id, state=PartitionState.PLANNED)
    )
    connection.execute(sa.delete(subjects).where(subjects.c.subject_id == row.subject_id))
    return operation_id


# ── groups of a subject that is replaced ──────────────────────────────────────────────────────────────
def _place_groups(
    connection: Connection, target: SubjectRow, ask: PublishSubject, children: list[int]
) -> None:
    """
    Fix where the groups of the target go on in the new partitions.  Brokers store it as they store where new groups begin.

    Raises:
        InvalidRequestError: a position is of another partition.
        PublishGroupsError: a group has no position.
        GroupBusyError: a group has live consumers, or its progress is being set.
    """
    mine = sa.and_(groups.c.subject_id == target.subject_id, sa.not_(groups.c.deleting))
    known = connection.execute(
        sa.select(groups).where(mine).order_by(groups.c.group_id).with_for_update()
    ).all()
    lacking = sorted({group.name for group in known} - set(ask.starts))
    if lacking:
        raise PublishGroupsError(
            f"{counted(len(lacking), 'consumer group')} of {target.name!r} would have no position: {', '.join(lacking[:10])}",
            subject=target.name,
            groups=", ".join(lacking),
        )
    for group in known:
        _check_quiet(connection, group.group_id, group.name)
        cursors = ask.starts[group.name]
        if set(cursors) != set(children):
            raise InvalidRequestError(
                f"group {group.name!r}: positions are wanted in the partitions {sorted(children)}"
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
        here = groups.c.group_id == group.group_id
        connection.execute(
            sa.update(groups).where(here).values(version=groups.c.version + 1, **values)
        )


def _check_quiet(connection: Connection, group_id: int, name: str) -> None:
    left_ms = duty_left_ms(connection, reset_duty(group_id))
    sweep_sessions(connection, group_id)
    live = connection.execute(
        sa.select(sa.func.count()).where(sessions.c.group_id == group_id)
    ).scalar_one()
    if live or left_ms:
        what = (
            "its progress is being set" if left_ms else f"it has {counted(live, 'live consumer')}"
        )
        raise GroupBusyError(
            f"consumer group {name!r} is carried over only while it stands still, and {what}: stop it, "
            "publish, and start it again",
            sessions=live,
        )
