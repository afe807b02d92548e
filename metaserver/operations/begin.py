"""Plans operations based on the database, and journals them. Runs SQL synchronously; the decisions
are made in `plan.py`.

Invariants
    An operation, its children with their lineage, and its steps are stored in one transaction.
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
    broker_views,
    cordon_broker,
    lock_brokers,
    no_host_error,
    unknown_broker_group_error,
    writable_groups,
)
from ..cluster.lost_database import check_database_complete
from ..cluster.removals import cancel_removals
from ..cluster.rows import SubjectRow
from ..sql.dialect import now_ms
from ..sql.schema import operations, partition_parents, partitions, steps, subjects
from .evacuations import continue_without_source, plan_evacuations
from .plan import (
    EMPTY_PLAN,
    Plan,
    plan_growth,
    plan_merge,
    plan_move,
    plan_resize,
    plan_settings_change,
    plan_split,
)
from .plan_inputs import PlannedOperation, lock_idle_subject, open_partitions


def plan_operations(connection: Connection, request: Reshape) -> list[PlannedOperation]:
    """
    Plan the changes to all subjects affected by the request, and lock these subjects.

    Returns:
        The planned operations; a plan is empty if there is nothing to do.

    Raises:
        InvalidRequestError, SubjectUnknownError, PartitionUnknownError
        NotFoundError: the broker group has never sent a report, or the subject has no such queue.
        UnavailableError: no broker group can host new partitions, or the database has lost data
            that brokers have.
        ConflictError: the target of a move is cordoned, a change other than a growth would alter
            the queues of a static subject, or the subject to grow has no queues.
        BusyError: another operation on the subject has not changed the route yet.
    """
    if request.kind is OperationKind.CREATE:
        raise InvalidRequestError("subjects are created with POST /v1/subjects")
    if request.kind in {OperationKind.PUBLISH, OperationKind.CUT}:
        raise InvalidRequestError(
            "hidden subjects have separate calls: /v1/subjects/{subject}/hidden and /publish"
        )
    if request.kind is OperationKind.SET and not isinstance(request, SetSubject):
        raise InvalidRequestError("settings are changed with POST /v1/subjects/{subject}/settings")
    if request.kind is not OperationKind.EVACUATE and (
        request.without_source or request.accept_loss
    ):
        # They affect all subjects on a broker group, so a right on one subject is not enough.
        raise InvalidRequestError("without_source and accept_loss require an evacuation")
    check_database_complete(connection)
    if request.kind is OperationKind.EVACUATE:
        return plan_evacuations(connection, request)
    hosts: Mapping[BrokerGroup, int] = writable_groups(connection)
    if request.kind in {OperationKind.RESIZE, OperationKind.GROW, OperationKind.SET}:
        subject = lock_idle_subject(connection, request.subject)
    else:
        subject = lock_idle_subject(
            connection, _find_subject_name(connection, request.partition_ids)
        )
    try:
        plan = _plan_subject(connection, request, subject, hosts)
    except UnavailableError as error:
        if hosts:
            raise
        raise no_host_error(connection) from error
    return [PlannedOperation(subject=subject, plan=plan)]


def _plan_subject(
    connection: Connection, request: Reshape, subject: SubjectRow, hosts: Mapping[BrokerGroup, int]
) -> Plan:
    if isinstance(request, SetSubject):
        settings = (
            (request.order_strategy, subject.order_strategy),
            (request.retention, subject.retention),
            (request.message_bytes_max, subject.message_bytes_max),
        )
        is_unchanged = all(new_value in {None, old_value} for new_value, old_value in settings)
        return (
            EMPTY_PLAN
            if is_unchanged
            else plan_settings_change(open_partitions(connection, subject), hosts)
        )
    current = open_partitions(connection, subject)
    if request.kind is OperationKind.GROW:
        if not subject.static:
            raise ConflictError(Reason.SUBJECT_NOT_STATIC, subject=subject.name)
        return plan_growth(
            subject.name, current, hosts, count=request.partitions, queues=request.queues
        )
    if subject.static and request.kind is not OperationKind.MOVE:
        raise ConflictError(Reason.SUBJECT_STATIC, subject=subject.name, queues=len(current))
    if request.kind is OperationKind.RESIZE:
        return plan_resize(current, request.partitions, hosts)
    if request.kind is OperationKind.MERGE:
        return plan_merge(current, request.partition_ids, hosts)
    if request.kind is OperationKind.SPLIT:
        if len(request.partition_ids) != 1:
            raise InvalidRequestError("a split takes exactly one partition")
        return plan_split(current, request.partition_ids[0], hosts)
    assert request.kind is OperationKind.MOVE
    target = BrokerGroup(request.broker_group)
    _check_target(connection, target, hosts)
    return plan_move(current, request.partition_ids, target)


def begin_operations(
    connection: Connection, request: Reshape, *, driver: str, lease_ms: int
) -> list[tuple[int, PlannedOperation]]:
    """
    Plan operations and journal them, leased to `driver` for `lease_ms`. An evacuation also cordons
    the broker group.

    Returns:
        (operation id, planned operation) for each subject; the id is 0 if the plan is empty.

    Raises:
        KeylaneError: any error of `plan_operations`; nothing is stored.
    """
    begun_operations = []
    is_evacuation = request.kind is OperationKind.EVACUATE
    lock_brokers(connection, alone=is_evacuation)
    if is_evacuation:
        cordon_broker(connection, request.broker_group, True)
    if request.accept_loss:
        cancel_removals(connection, request.broker_group)
    for planned in plan_operations(connection, request):
        operation_id = planned.continued_id
        if operation_id:
            continue_without_source(connection, operation_id, request)
        elif planned.plan.sealed:
            operation_id = journal_operation(
                connection, request, planned, driver=driver, lease_ms=lease_ms
            )
        begun_operations.append((operation_id, planned))
    return begun_operations


_subject_name_query = (
    sa.select(subjects.c.name)
    .join(partitions, partitions.c.subject_id == subjects.c.subject_id)
    .where(partitions.c.partition_id == sa.bindparam("of_partition"))
)

_open_ids_query = (
    sa.select(partitions.c.partition_id)
    .where(partitions.c.state == PartitionState.OPEN)
    .order_by(partitions.c.partition_id)
    .limit(LISTED_MAX)
)
_open_count_query = (
    sa.select(sa.func.count())
    .select_from(partitions)
    .where(partitions.c.state == PartitionState.OPEN)
)


def _find_subject_name(connection: Connection, ids: tuple[int, ...]) -> str:
    """Return the name of the subject to which the first of these partitions belongs."""
    subject = None
    if ids and 0 < ids[0] <= MAX_I64:
        rows = connection.execute(_subject_name_query, {"of_partition": ids[0]})
        subject = rows.scalar_one_or_none()
    if subject is None:
        problem = f"there is no partition {ids[0]}" if ids else "no partition is given"
        open_ids = connection.execute(_open_ids_query).scalars()
        open_partitions_text = listed(open_ids, connection.execute(_open_count_query).scalar_one())
        error_details = {"partition_id": ids[0]} if ids else {}
        raise PartitionUnknownError(
            f"{problem}; open partitions: {open_partitions_text}", **error_details
        )
    return str(subject)


def _check_target(
    connection: Connection, target: BrokerGroup, hosts: Mapping[BrokerGroup, int]
) -> None:
    """Check that a broker group can be the target of a move. Raises ConflictError, NotFoundError or
    UnavailableError.
    """
    check_name("broker group", target)
    view = next((view for view in broker_views(connection) if view.broker_group == target), None)
    if view is None:
        raise unknown_broker_group_error(connection, target)
    if view.cordoned:
        raise ConflictError(
            Reason.BROKER_CORDONED,
            f"broker group {target!r} is cordoned: it cannot get new partitions",
            broker_group=target,
        )
    if target not in hosts:
        raise UnavailableError(
            Reason.NOT_ENOUGH_BROKERS,
            f"broker group {target!r} {'' if view.available else 'is '}{view.state}",
            broker_group=target,
        )


def journal_operation(
    connection: Connection,
    request: Reshape,
    planned: PlannedOperation,
    *,
    driver: str,
    lease_ms: int,
) -> int:
    """Store an operation with its children, their lineage and its steps, leased to `driver`. Return
    the operation's id.
    """
    subject_id = planned.subject.subject_id
    operation_id: int = connection.execute(
        sa.insert(operations)
        .values(
            subject_id=subject_id,
            kind=request.kind,
            state=OperationState.PLAN,
            without_source=request.without_source or request.accept_loss,
            problem="",
            running=subject_id,
            driver=driver,
            driven_until=now_ms() + lease_ms,
            new_order_strategy=request.order_strategy if isinstance(request, SetSubject) else None,
            new_retention=request.retention if isinstance(request, SetSubject) else None,
            new_message_bytes_max=request.message_bytes_max
            if isinstance(request, SetSubject)
            else None,
        )
        .returning(operations.c.operation_id)
    ).scalar_one()
    planned_steps = [(sealed_id, StepAction.SEAL) for sealed_id in planned.plan.sealed]
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
        planned_steps.append((partition_id, StepAction.HOST))
    rows = [
        {
            "operation_id": operation_id,
            "partition_id": step_id,
            "action": action,
            "done": False,
            "given_up": request.accept_loss and action is StepAction.SEAL,
        }
        for step_id, action in planned_steps
    ]
    connection.execute(sa.insert(steps), rows)
    connection.execute(
        sa.update(subjects)
        .where(subjects.c.subject_id == subject_id)
        .values(partitions_named=planned.subject.partitions_named + len(planned.plan.children))
    )
    return operation_id
