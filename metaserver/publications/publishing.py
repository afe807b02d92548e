"""Publishes hidden subjects: their partitions become their target's. SQL, synchronous.

    no target     The hidden subject takes the name, in this one transaction.
    a target      An operation seals its open partitions, then one transaction changes the route:
                  the partitions of the hidden subject, which are children of the sealed ones, are
                  open; with `replaces`, all older ones expire.
    a cut         An operation seals the hidden partitions, then one transaction changes the route:
                  they are readable, and the older ones, which the cut has sealed, expire; the open
                  ones, which continue both, stay as they are.

Invariants
    A publication is journaled with its changes, so that a repeat finds it and changes nothing.
    The open partitions of the target are the parents with which the hidden subject's partitions are
    hosted; otherwise the publication is refused. With a cut any operation may come in between,
    because the replaced partitions were sealed by the cut.
    With a cut no message is deleted that the caller does not know: ends are compared, and sealed
    partitions have their ends for ever.
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
from ..cluster.lost_database import check_not_lost
from ..cluster.removals import being_deleted
from ..cluster.rows import SubjectRow
from ..cluster.subjects import check_open, find_subject
from ..groups.sessions import sweep_sessions
from ..groups.views import revision_of
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
from .cuts import check_continues, check_cut, cut_of, outdated, parents_of


def begin_publication(
    connection: Connection, hidden: str, ask: PublishSubject, *, driver: str, lease_ms: int
) -> int:
    """
    Publish a hidden subject, or begin the operation that publishes it; a repeat changes nothing.

    Returns:
        The id of the operation, leased to `driver`; 0 if there was no target and everything is
        done.

    Raises:
        InvalidRequestError, SubjectUnknownError, SubjectDeletedError,
            UnavailableError
        PublishError: the subject is not hidden, or was made for another target.
        PublishError: the target's partitions have changed, or the target was created or
            deleted since.
        BusyError: the target's partitions are being changed.
        PublishError, BusyError: the target is to be replaced, and a group of it has no
            position, or has live consumers.
        PublishError: the target is to be replaced, and a group of it has changed since its
            cursors were read.
        PublishError: the target is to be replaced, and has messages that the hidden subject
            lacks.
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
    parents = parents_of(connection, row)
    if target is None:
        # A subject made beside a target counts the target's names too; the lineage goes with the
        # target.
        if row.partitions_named > len(parents):
            raise outdated(row, "its target was deleted")
        _take_name(connection, row, ask.target)
        operation_id = 0
    else:
        check_open(connection, ask.target, target)
        todo = _steps_of(connection, row, target, ask, parents)
        operation_id = _journal(
            connection, row, target, ask, todo, driver=driver, lease_ms=lease_ms
        )
        if ask.replace:
            _place_groups(connection, target, ask, list(parents))
    connection.execute(
        sa.insert(publications).values(
            hidden=hidden,
            target=ask.target,
            operation_id=operation_id,
            replaces=ask.replace,
            subject_id=row.subject_id,
        )
    )
    return operation_id


def _take_name(connection: Connection, row: SubjectRow, target: str) -> None:
    """Give the hidden subject the name of its target, which does not exist."""
    taken = {
        "name": target,
        "hidden_for": "",
        "hidden_since": None,
        "filled_by": "",
        "route_version": row.route_version + 1,
    }
    here = subjects.c.subject_id == row.subject_id
    connection.execute(sa.update(subjects).where(here).values(**taken))


def _published(connection: Connection, hidden: str, ask: PublishSubject) -> int | None:
    chosen = sa.select(publications).where(publications.c.hidden == hidden)
    known = connection.execute(chosen).one_or_none()
    if known is None:
        return None
    if (known.target, known.replaces) != (ask.target, ask.replace):
        how = ", replacing it" if known.replaces else ""
        raise PublishError(
            Reason.PUBLISH_TARGET,
            f"{hidden!r} was published in {known.target!r}{how}",
            subject=hidden,
            target=ask.target,
        )
    _check_id(hidden, known.subject_id, ask)
    return int(known.operation_id)


def _check_id(hidden: str, subject_id: int, ask: PublishSubject) -> None:
    """Check that the subject is the one that is meant, and not a later one of its name. Raises
    SubjectDeletedError.
    """
    if ask.subject_id and ask.subject_id != subject_id:
        raise SubjectDeletedError(
            f"hidden subject {hidden!r} with id {ask.subject_id} was deleted, and another one was "
            "made under its name, which is not published in its place",
            subject=hidden,
        )


def _check_hidden(
    connection: Connection, hidden: str, row: SubjectRow | None, ask: PublishSubject
) -> SubjectRow:
    if row is None:
        check_not_lost(connection)
        raise SubjectUnknownError(subject=hidden)
    if row.deleting:
        raise being_deleted(connection, row.subject_id, hidden)
    _check_id(hidden, row.subject_id, ask)
    if not row.hidden_for:
        raise PublishError(
            Reason.PUBLISH_TARGET,
            f"subject {hidden!r} is not hidden",
            subject=hidden,
            target=ask.target,
        )
    if row.hidden_for != ask.target:
        raise PublishError(
            Reason.PUBLISH_TARGET,
            f"{hidden!r} was made for {row.hidden_for!r}",
            subject=hidden,
            target=ask.target,
        )
    if row.route_version == 0:
        raise SubjectUnknownError(f"the creation of {hidden!r} is not finished yet", subject=hidden)
    return row


def _steps_of(
    connection: Connection,
    row: SubjectRow,
    target: SubjectRow,
    ask: PublishSubject,
    parents: Mapping[int, set[int]],
) -> list[tuple[int, StepAction, bool]]:
    """Return (partition id, action, done) of each step of a publication. Raises as
    `begin_publication`.
    """
    cut = cut_of(connection, list(parents))
    if cut is not None:
        check_cut(connection, row, target, ask, cut, parents)
        return [(hidden_id, StepAction.SEAL, False) for hidden_id in parents]
    if ask.ends is not None:
        raise PublishError(
            Reason.PUBLISH_TARGET,
            f"{row.name!r} was made without a cut: messages that are sent meanwhile would be "
            "deleted unread; delete it, and reprocess the subject into itself again",
            subject=row.name,
            target=target.name,
        )
    check_continues(connection, row, target, parents)
    todo = [(child, StepAction.HOST, True) for child in parents]
    sealed = sorted(set().union(*parents.values()))
    return todo + [(parent, StepAction.SEAL, False) for parent in sealed]


def _journal(
    connection: Connection,
    row: SubjectRow,
    target: SubjectRow,
    ask: PublishSubject,
    todo: Sequence[tuple[int, StepAction, bool]],
    *,
    driver: str,
    lease_ms: int,
) -> int:
    """Journal the operation, and give the target the hidden subject's partitions, which are hosted
    already and become visible when the operation is done.
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
            replaces=ask.replace,
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


# ── groups of a subject that is replaced ──────────────────────────────────────────────────────────
def _place_groups(
    connection: Connection, target: SubjectRow, ask: PublishSubject, children: list[int]
) -> None:
    """
    Fix where the groups of the target continue in the new partitions. Brokers store it like the
    starts of new groups.

    Raises:
        InvalidRequestError: a position belongs to another partition.
        PublishError: a group has no position.
        PublishError: a group has changed since its cursors were read.
        BusyError: a group has live consumers, or its cursors are being set.
    """
    mine = sa.and_(groups.c.subject_id == target.subject_id, sa.not_(groups.c.deleting))
    known = connection.execute(
        sa.select(groups).where(mine).order_by(groups.c.group_id).with_for_update()
    ).all()
    lacking = sorted({group.name for group in known} - set(ask.starts))
    if lacking:
        raise PublishError(
            Reason.PUBLISH_GROUPS,
            f"{counted(len(lacking), 'consumer group')} of {target.name!r} would have no position: "
            f"{', '.join(lacking[:10])}",
            subject=target.name,
            groups=", ".join(lacking),
        )
    for group in known:
        _check_quiet(connection, group.group_id, group.name)
        revision = ask.revisions.get(group.name)
        if revision and revision != revision_of(group.group_id, group.version, group.last_token):
            raise PublishError(
                Reason.PUBLISH_CURSORS,
                f"consumer group {group.name!r} was reset, or had a consumer, since its cursors "
                f"were read",
                subject=target.name,
                group=group.name,
            )
        cursors = ask.starts[group.name]
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
        raise BusyError(
            Reason.GROUP_BUSY,
            f"consumer group {name!r} must not be running when it is carried over, and {what}: "
            "stop it, publish, and start it again",
            sessions=live,
        )
