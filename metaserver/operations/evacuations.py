"""Plans evacuations, which move all open and planned partitions off a broker group. Runs SQL
synchronously.

    the broker group is alive   If an operation or creation is running on any of the subjects, the
                                whole evacuation is refused.

    the broker group is silent  Subjects are handled independently. Either an evacuation is planned,
    (without_source)            or the running operation continues without the broker group, or the
                                subject is reported as busy. Sealed partitions on the group are
                                abandoned as well, because they block groups that have not read
                                them.

    the broker group is lost    The same, but for strict subjects as well. All partitions on the
    (accept_loss)               group are given up. A static subject's queue continues above all
                                offsets that the lost partition can have.

Invariants
    Every open or planned partition of the broker group is either planned to leave or reported as
    busy. If the broker group is silent, this also applies to its sealed partitions that block a
    consumer group.
    An operation continues without its source only if the subject allows reordered messages, or if
    an operator has accepted the loss.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from ...protocol.errors import BusyError, InvalidRequestError, Reason, UnavailableError
from ...protocol.ids import BrokerGroup, PartitionId, check_name
from ...protocol.operations import BusySubject, Reshape, StepAction
from ...protocol.queues import start_behind_loss
from ...protocol.routing import OrderStrategy, PartitionState
from ..cluster.brokers import last_report, no_host_error, writable_groups
from ..cluster.losses import read_losses
from ..cluster.rows import SubjectRow
from ..cluster.subjects import check_not_hidden, find_subject
from ..sql.schema import drained, groups, operations, partitions, steps, subjects
from .plan import EMPTY_PLAN, plan_evacuation
from .plan_inputs import (
    PlannedOperation,
    open_partitions,
    running_operation,
)
from .states import may_reorder

_LEAVING_STATES = (PartitionState.PLANNED, PartitionState.OPEN)
"""States of partitions that must leave. Planned ones are included because they would open even
though the group is cordoned.
"""
_has_drained = sa.select(sa.literal(1)).where(
    drained.c.group_id == groups.c.group_id, drained.c.partition_id == partitions.c.partition_id
)
_not_drained = sa.select(sa.literal(1)).where(
    groups.c.subject_id == partitions.c.subject_id,
    sa.not_(sa.exists(_has_drained.correlate(groups, partitions))),
)
_blocks_groups = sa.and_(
    partitions.c.state == PartitionState.SEALED,
    partitions.c.end_offset.is_not(None),
    sa.or_(
        sa.and_(subjects.c.order_strategy == OrderStrategy.BEST_TRIED, sa.not_(subjects.c.static)),
        sa.exists(_not_drained.correlate(partitions)),
    ),
)
"""True for sealed partitions that block consumer groups. If the subject allows reordered messages,
these are all sealed partitions, because they would also block future groups; otherwise, they are
those that an existing group has not drained.
"""
_is_sealed = partitions.c.state == PartitionState.SEALED


def plan_evacuations(connection: Connection, request: Reshape) -> list[PlannedOperation]:
    """
    Plan the evacuation of each subject on the broker group, in the order of their names, and lock
    these subjects.

    Raises:
        NotFoundError, UnavailableError
        InvalidRequestError: the group's name is invalid, `without_source` or `accept_loss` is given
            but the broker group is not silent, or a queue of a static subject has no logic offsets
            left above the loss.
        BusyError: the broker group is alive, and an operation or creation is running on a subject.
        ConflictError: the broker group is alive, and a hidden subject has partitions on it.
    """
    source = BrokerGroup(request.broker_group)
    check_name("broker group", source)
    without_broker = request.without_source or request.accept_loss
    report = last_report(connection, source)
    if report.left_ms > 0 and without_broker:
        raise InvalidRequestError(
            f"broker group {source!r} {report.age_text}, and counts as alive. If it is dead, "
            f"{report.advice}. If it "
            "is running, evacuate it without --without-source and --accept-loss: then it "
            "seals its partitions, and order is kept"
        )
    has_leaving_state = partitions.c.state.in_(_LEAVING_STATES)
    blocking_condition = _is_sealed if request.accept_loss else _blocks_groups
    names_query = (
        sa.select(subjects.c.name)
        .join(partitions, partitions.c.subject_id == subjects.c.subject_id)
        .where(
            partitions.c.broker_group == source,
            sa.or_(has_leaving_state, blocking_condition) if without_broker else has_leaving_state,
        )
        .distinct()
        .order_by(subjects.c.name)
    )
    host_loads = Counter(writable_groups(connection))
    plans = []
    for name in connection.execute(names_query).scalars().all():
        subject = find_subject(connection, name, lock=True)
        assert subject is not None
        if subject.hidden_for:
            plans.append(_refuse_hidden(request, subject))
            continue
        running_id = running_operation(connection, subject.subject_id)
        if running_id is not None or subject.route_version == 0:
            plans.append(_plan_busy(connection, request, subject, running_id or 0))
            continue
        try:
            plan = plan_evacuation(open_partitions(connection, subject), source, host_loads)
        except UnavailableError as error:
            raise no_host_error(connection, excluded=source) from error
        host_loads.update(child.broker_group for child in plan.children)
        sealed_ids = (
            _blocking_partitions(connection, subject, source, blocking_condition)
            if without_broker
            else ()
        )
        busy_subject = None
        if sealed_ids and _may_continue_without_source(subject, request):
            plan = replace(plan, sealed=plan.sealed + sealed_ids)
        elif sealed_ids:
            problem = (
                "it is strict or static; the children of its sealed partitions wait until the "
                "broker group is back"
            )
            busy_subject = BusySubject(subject=subject.name, operation_id=0, problem=problem)
        planned = PlannedOperation(subject=subject, plan=plan, busy_subject=busy_subject)
        if request.accept_loss:
            planned = replace(planned, losses=read_losses(connection, plan.sealed))
            _check_starts(subject, [child.name for child in planned.children()])
        plans.append(planned)
    return plans


def _check_starts(subject: SubjectRow, names: Iterable[str]) -> None:
    """Check that children can start at a logic offset above a loss. Raises InvalidRequestError."""
    for name in names if subject.static else ():
        start_behind_loss(name)


def _may_continue_without_source(subject: SubjectRow, request: Reshape) -> bool:
    """Return True if the subject's operations may continue without the silent broker group."""
    return may_reorder(subject.order_strategy, static=subject.static) or request.accept_loss


def _blocking_partitions(
    connection: Connection,
    subject: SubjectRow,
    source: BrokerGroup,
    blocking_condition: sa.ColumnElement[bool],
) -> tuple[PartitionId, ...]:
    """Return a subject's sealed partitions on a broker group that block consumer groups."""
    is_on_broker = sa.and_(
        partitions.c.subject_id == subject.subject_id, partitions.c.broker_group == source
    )
    ids = (
        sa.select(partitions.c.partition_id).join(subjects).where(is_on_broker, blocking_condition)
    )
    return tuple(connection.execute(ids.order_by(partitions.c.partition_id)).scalars())


def _child_names(connection: Connection, operation_id: int) -> list[str]:
    """Return the names of an operation's children."""
    names = (
        sa.select(partitions.c.name)
        .join(steps, steps.c.partition_id == partitions.c.partition_id)
        .where(steps.c.operation_id == operation_id, steps.c.action == StepAction.HOST)
    )
    return list(connection.execute(names).scalars())


def continue_without_source(connection: Connection, operation_id: int, request: Reshape) -> None:
    """
    Let a running operation continue without silent sources, or without a broker group whose loss
    has been accepted.

    The caller must have locked the operation's subject.
    """
    if not request.accept_loss:
        is_this_operation = operations.c.operation_id == operation_id
        connection.execute(
            sa.update(operations).where(is_this_operation).values(without_source=True)
        )
        return
    partition_ids = sa.select(partitions.c.partition_id).where(
        partitions.c.broker_group == request.broker_group
    )
    is_lost_step = sa.and_(
        steps.c.operation_id == operation_id, steps.c.partition_id.in_(partition_ids)
    )
    connection.execute(sa.update(steps).where(is_lost_step).values(given_up=True))


def _refuse_hidden(request: Reshape, subject: SubjectRow) -> PlannedOperation:
    """Return the result of an evacuation for a hidden subject, which cannot be moved. Raises
    ConflictError if the broker group is alive.
    """
    if not (request.without_source or request.accept_loss):
        check_not_hidden(subject)
    problem = f"it is hidden until it is published in {subject.hidden_for!r}; delete it"
    busy_subject = BusySubject(subject=subject.name, operation_id=0, problem=problem)
    return PlannedOperation(subject=subject, plan=EMPTY_PLAN, busy_subject=busy_subject)


def _plan_busy(
    connection: Connection, request: Reshape, subject: SubjectRow, running_id: int
) -> PlannedOperation:
    """Return the result of an evacuation for a subject with a running operation or an unfinished
    creation. Raises BusyError if the broker group is alive.
    """
    if not (request.without_source or request.accept_loss):
        if running_id:
            raise BusyError(Reason.OPERATION_RUNNING, subject=subject.name, operation_id=running_id)
        raise BusyError(
            Reason.CREATION_RUNNING, subject=subject.name, broker_group=request.broker_group
        )
    group_steps = connection.execute(
        sa.select(steps.c.action, steps.c.done, steps.c.partition_id)
        .join(partitions, partitions.c.partition_id == steps.c.partition_id)
        .where(
            steps.c.operation_id == running_id, partitions.c.broker_group == request.broker_group
        )
    ).all()
    open_rows = open_partitions(connection, subject)
    open_count = sum(partition.broker_group == request.broker_group for partition in open_rows)
    seal_count = sum(step.action == StepAction.SEAL for step in group_steps)
    hosted_flags = [step.done for step in group_steps if step.action == StepAction.HOST]
    unsealed_ids = [
        step.partition_id
        for step in group_steps
        if step.action == StepAction.SEAL and not step.done
    ]
    continued_id = 0
    problem = "another operation is running on it; evacuate again when that is done"
    if not running_id:
        problem = "it is still being created, with partitions on the broker group"
    elif not all(hosted_flags):
        problem = (
            "its operation will open partitions on the broker group; cancel it, then evacuate again"
        )
    elif unsealed_ids and not _may_continue_without_source(subject, request):
        problem = "it is strict or static; its operation waits until the broker group is back"
    elif unsealed_ids or (request.accept_loss and hosted_flags):
        continued_id = running_id
        problem = ""
        if request.accept_loss:
            _check_starts(subject, _child_names(connection, running_id))
        blocking_condition = _is_sealed if request.accept_loss else _blocks_groups
        sealed_ids = _blocking_partitions(
            connection, subject, BrokerGroup(request.broker_group), blocking_condition
        )
        if hosted_flags or seal_count < open_count or sealed_ids:
            problem = (
                "its operation continues, but leaves partitions on the broker group; evacuate "
                "again when it is done"
            )
    busy_subject = BusySubject(subject=subject.name, operation_id=running_id, problem=problem)
    return PlannedOperation(
        subject=subject,
        plan=EMPTY_PLAN,
        continued_id=continued_id,
        busy_subject=busy_subject if problem else None,
        losses=read_losses(connection, unsealed_ids)
        if continued_id and request.accept_loss
        else (),
    )
