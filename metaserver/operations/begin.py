"""Plans operations from the rows, and journals them: SQL around the deciders of `plan.py`,
synchronous.

Invariants
    An operation, its children, the children's lineage and its steps are stored in one transaction.
    A subject has at most one running operation.
"""

from __future__ import annotations

from collections.abc import Mapping

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from ...protocol.errors import (
    ConflictError,
    InvalidRequestError,
    PartitionUnknownError,
    Reason,
    UnavailableError,
)
from ...protocol.ids import MAX_I64, BrokerGroup, check_name
from ...protocol.operations import OperationKind, OperationState, Reshape, SetSubject, StepAction
from ...protocol.routing import PartitionState
from ...protocol.text import LISTED_MAX, listed
from ..cluster.brokers import (
    broker_alive,
    broker_views,
    cordon_broker,
    is_cordoned,
    lock_brokers,
    no_host,
    writable_groups,
)
from ..cluster.lost_database import check_not_lost
from ..cluster.removals import give_up_removals
from ..cluster.rows import SubjectRow
from ..sql.dialect import now_ms
from ..sql.schema import operations, partition_parents, partitions, steps, subjects
from .evacuations import continue_without, plan_evacuations
from .plan import (
    NOTHING,
    Plan,
    plan_growth,
    plan_merge,
    plan_move,
    plan_resize,
    plan_set,
    plan_split,
)
from .plan_inputs import PlannedOperation, free_subject, open_partitions


def plan_operations(connection: Connection, ask: Reshape) -> list[PlannedOperation]:
    """
    Plan a change of each subject that a request concerns, and lock these subjects.

    Returns:
        The planned operations; the plan of an operation is empty if there is nothing to do.

    Raises:
        InvalidRequestError, SubjectUnknownError, PartitionUnknownError,
        NotFoundError
        NotFoundError: the broker group has never reported itself.
        UnavailableError: no broker group can host new partitions now.
        ConflictError: the target of a move is cordoned.
        BusyError: another operation on the subject has not changed the route yet.
        ConflictError: the change would alter the queues of a static subject, and is no growth.
        ConflictError: a growth of a subject without queues.
        UnavailableError: the brokers host partitions that this database does not know.
    """
    if ask.kind is OperationKind.CREATE:
        raise InvalidRequestError("a subject is created by POST /v1/subjects")
    if ask.kind in {OperationKind.PUBLISH, OperationKind.CUT}:
        raise InvalidRequestError(
            "hidden subjects have calls of their own: /v1/subjects/{subject}/hidden and /publish"
        )
    if ask.kind is OperationKind.SET and not isinstance(ask, SetSubject):
        raise InvalidRequestError("settings are changed by POST /v1/subjects/{subject}/settings")
    if ask.kind is not OperationKind.EVACUATE and (ask.without_source or ask.accept_loss):
        # They are about all subjects of a broker group: a right on one subject does not allow them.
        raise InvalidRequestError("without_source and accept_loss belong to an evacuation")
    check_not_lost(connection)
    if ask.kind is OperationKind.EVACUATE:
        return plan_evacuations(connection, ask)
    hosts: Mapping[BrokerGroup, int] = writable_groups(connection)
    if ask.kind in {OperationKind.RESIZE, OperationKind.GROW, OperationKind.SET}:
        subject = free_subject(connection, ask.subject)
    else:
        subject = free_subject(connection, _subject_of(connection, ask.partition_ids))
    try:
        plan = _plan(connection, ask, subject, hosts)
    except UnavailableError as error:
        if hosts:
            raise
        raise no_host(connection) from error
    return [PlannedOperation(subject=subject, plan=plan)]


def _plan(
    connection: Connection, ask: Reshape, subject: SubjectRow, hosts: Mapping[BrokerGroup, int]
) -> Plan:
    if isinstance(ask, SetSubject):
        pairs = (
            (ask.order_strategy, subject.order_strategy),
            (ask.retention, subject.retention),
            (ask.message_bytes_max, subject.message_bytes_max),
        )
        same = all(asked in {None, there} for asked, there in pairs)
        return NOTHING if same else plan_set(open_partitions(connection, subject), hosts)
    current = open_partitions(connection, subject)
    if ask.kind is OperationKind.GROW:
        if not subject.static:
            raise ConflictError(Reason.SUBJECT_NOT_STATIC, subject=subject.name)
        return plan_growth(subject.name, current, hosts, count=ask.partitions, queues=ask.queues)
    if subject.static and ask.kind is not OperationKind.MOVE:
        raise ConflictError(Reason.SUBJECT_STATIC, subject=subject.name, queues=len(current))
    if ask.kind is OperationKind.RESIZE:
        return plan_resize(current, ask.partitions, hosts)
    if ask.kind is OperationKind.MERGE:
        return plan_merge(current, ask.partition_ids, hosts)
    if ask.kind is OperationKind.SPLIT:
        if len(ask.partition_ids) != 1:
            raise InvalidRequestError("a split takes one partition")
        return plan_split(current, ask.partition_ids[0], hosts)
    assert ask.kind is OperationKind.MOVE
    target = BrokerGroup(ask.broker_group)
    _check_target(connection, target, hosts)
    return plan_move(current, ask.partition_ids, target)


def begin_operations(
    connection: Connection, ask: Reshape, *, driver: str, lease_ms: int
) -> list[tuple[int, PlannedOperation]]:
    """
    Plan operations and journal them, leased to `driver` for `lease_ms`. An evacuation also cordons
    its broker group.

    Returns:
        (operation id, plan) of each subject; the id is 0 if the plan is empty.

    Raises:
        The errors of `plan_operations`; nothing is stored then.
    """
    begun = []
    evacuates = ask.kind is OperationKind.EVACUATE
    lock_brokers(connection, alone=evacuates)
    if evacuates:
        cordon_broker(connection, ask.broker_group, True)
    if ask.accept_loss:
        give_up_removals(connection, ask.broker_group)
    for planned in plan_operations(connection, ask):
        operation_id = planned.freed
        if operation_id:
            continue_without(connection, operation_id, ask)
        elif planned.plan.sealed:
            operation_id = journal_operation(
                connection, ask, planned, driver=driver, lease_ms=lease_ms
            )
        begun.append((operation_id, planned))
    return begun


_subject_name = (
    sa.select(subjects.c.name)
    .join(partitions, partitions.c.subject_id == subjects.c.subject_id)
    .where(partitions.c.partition_id == sa.bindparam("of_partition"))
)

_open_ids = (
    sa.select(partitions.c.partition_id)
    .where(partitions.c.state == PartitionState.OPEN)
    .order_by(partitions.c.partition_id)
    .limit(LISTED_MAX)
)
_open_count = (
    sa.select(sa.func.count())
    .select_from(partitions)
    .where(partitions.c.state == PartitionState.OPEN)
)


def _subject_of(connection: Connection, ids: tuple[int, ...]) -> str:
    """Return the subject of the first of these partitions."""
    known = None
    if ids and 0 < ids[0] <= MAX_I64:
        rows = connection.execute(_subject_name, {"of_partition": ids[0]})
        known = rows.scalar_one_or_none()
    if known is None:
        which = f"there is no partition {ids[0]}" if ids else "no partition is given"
        first = connection.execute(_open_ids).scalars()
        there_are = listed(first, connection.execute(_open_count).scalar_one())
        details = {"partition_id": ids[0]} if ids else {}
        raise PartitionUnknownError(f"{which}; open partitions: {there_are}", **details)
    return str(known)


def _check_target(
    connection: Connection, target: BrokerGroup, hosts: Mapping[BrokerGroup, int]
) -> None:
    check_name("broker group", target)
    alive = broker_alive(connection, target)
    if is_cordoned(connection, target):
        raise ConflictError(
            Reason.BROKER_CORDONED,
            f"broker group {target!r} is cordoned: it gets no new partitions",
            broker_group=target,
        )
    if target not in hosts:
        view = next(view for view in broker_views(connection) if view.broker_group == target)
        raise UnavailableError(
            Reason.NOT_ENOUGH_BROKERS,
            f"broker group {target!r} {'' if alive else 'is '}{view.state}",
            broker_group=target,
        )


def journal_operation(
    connection: Connection, ask: Reshape, planned: PlannedOperation, *, driver: str, lease_ms: int
) -> int:
    """Store an operation, its children, their lineage and its steps, leased to `driver`; returns
    the operation's id.
    """
    subject_id = planned.subject.subject_id
    operation_id: int = connection.execute(
        sa.insert(operations)
        .values(
            subject_id=subject_id,
            kind=ask.kind,
            state=OperationState.PLAN,
            without_source=ask.without_source or ask.accept_loss,
            problem="",
            running=subject_id,
            driver=driver,
            driven_until=now_ms() + lease_ms,
            new_order_strategy=ask.order_strategy if isinstance(ask, SetSubject) else None,
            new_retention=ask.retention if isinstance(ask, SetSubject) else None,
            new_message_bytes_max=ask.message_bytes_max if isinstance(ask, SetSubject) else None,
        )
        .returning(operations.c.operation_id)
    ).scalar_one()
    todo = [(sealed_id, StepAction.SEAL) for sealed_id in planned.plan.sealed]
    for child in planned.children():
        partition_id = connection.execute(
            sa.insert(partitions)
            .values(
                subject_id=subject_id,
                name=child.name,
                queue=child.queue,
                range_start=child.range_start,
                range_end=child.range_end,
                broker_group=child.broker_group,
                state=PartitionState.PLANNED,
            )
            .returning(partitions.c.partition_id)
        ).scalar_one()
        parents = [
            {"partition_id": partition_id, "parent_id": parent_id} for parent_id in child.parents
        ]
        connection.execute(sa.insert(partition_parents), parents)
        todo.append((partition_id, StepAction.HOST))
    rows = [
        {
            "operation_id": operation_id,
            "partition_id": step_id,
            "action": action,
            "done": False,
            "given_up": ask.accept_loss and action is StepAction.SEAL,
        }
        for step_id, action in todo
    ]
    connection.execute(sa.insert(steps), rows)
    connection.execute(
        sa.update(subjects)
        .where(subjects.c.subject_id == subject_id)
        .values(partitions_named=planned.subject.partitions_named + len(planned.plan.children))
    )
    return operation_id
