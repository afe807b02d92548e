"""Plans evacuations, which move all open and planned partitions off a broker group. SQL,
synchronous.

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
    busy. If the broker group is silent, so are its sealed partitions that block a consumer group.
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
"""States of partitions that must leave; planned ones would open although the group is cordoned."""
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
all of them, because they also block future groups; otherwise those that an existing group has not
drained.
"""
_is_sealed = partitions.c.state == PartitionState.SEALED


def plan_evacuations(connection: Connection, request: Reshape) -> list[PlannedOperation]:
    """
    Plan the evacuation of each subject on the broker group, by name, and lock these subjects.

    Raises:
        NotFoundError, UnavailableError
        InvalidRequestError: the group's name is invalid; `without_source` or `accept_loss` is given
            but the broker group is not silent; or a queue of a static subject has no logic offsets
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
            f"broker group {source!r} {report.age}, and counts as alive. If it is dead, "
            f"{report.ask_again}. If it "
            "is running, evacuate it without --without-source and --accept-loss: then it "
            "seals its partitions, and order is kept"
        )
    has_leaving_state = partitions.c.state.in_(_LEAVING_STATES)
    blocking = _is_sealed if request.accept_loss else _blocks_groups
    affected = (
        sa.select(subjects.c.name)
        .join(partitions, partitions.c.subject_id == subjects.c.subject_id)
        .where(
            partitions.c.broker_group == source,
            sa.or_(has_leaving_state, blocking) if without_broker else has_leaving_state,
        )
        .distinct()
        .order_by(subjects.c.name)
    )
    load = Counter(writable_groups(connection))
    plans = []
    for name in connection.execute(affected).scalars().all():
        subject = find_subject(connection, name, lock=True)
        assert subject is not None
        if subject.hidden_for:
            plans.append(_refuse_hidden(request, subject))
            continue
        running = running_operation(connection, subject.subject_id)
        if running is not None or subject.route_version == 0:
            plans.append(_plan_busy(connection, request, subject, running or 0))
            continue
        try:
            plan = plan_evacuation(open_partitions(connection, subject), source, load)
        except UnavailableError as error:
            raise no_host_error(connection, excluded=source) from error
        load.update(child.broker_group for child in plan.children)
        sealed = (
            _blocking_partitions(connection, subject, source, blocking) if without_broker else ()
        )
        busy = None
        if sealed and _may_continue(subject, request):
            plan = replace(plan, sealed=plan.sealed + sealed)
        elif sealed:
            problem = (
                "it is strict or static; the children of its sealed partitions wait until the "
                "broker group is back"
            )
            busy = BusySubject(subject=subject.name, operation_id=0, problem=problem)
        planned = PlannedOperation(subject=subject, plan=plan, busy=busy)
        if request.accept_loss:
            planned = replace(planned, losses=read_losses(connection, plan.sealed))
            _check_starts(subject, [child.name for child in planned.children()])
        plans.append(planned)
    return plans


def _check_starts(subject: SubjectRow, names: Iterable[str]) -> None:
    """Check that children can start at a logic offset above a loss. Raises InvalidRequestError."""
    for name in names if subject.static else ():
        start_behind_loss(name)


def _may_continue(subject: SubjectRow, request: Reshape) -> bool:
    """Return whether the subject's operations may continue without the silent broker group."""
    return may_reorder(subject.order_strategy, static=subject.static) or request.accept_loss


def _blocking_partitions(
    connection: Connection,
    subject: SubjectRow,
    source: BrokerGroup,
    blocking: sa.ColumnElement[bool],
) -> tuple[PartitionId, ...]:
    """Return a subject's sealed partitions on a broker group that block consumer groups."""
    on_group = sa.and_(
        partitions.c.subject_id == subject.subject_id, partitions.c.broker_group == source
    )
    ids = sa.select(partitions.c.partition_id).join(subjects).where(on_group, blocking)
    return tuple(connection.execute(ids.order_by(partitions.c.partition_id)).scalars())


def _child_names(connection: Connection, operation_id: int) -> list[str]:
    """Return the names of an operation's children."""
    names = (
        sa.select(partitions.c.name)
        .join(steps, steps.c.partition_id == partitions.c.partition_id)
        .where(steps.c.operation_id == operation_id, steps.c.action == StepAction.HOST)
    )
    return list(connection.execute(names).scalars())


def continue_without(connection: Connection, operation_id: int, request: Reshape) -> None:
    """
    Let a running operation continue without silent sources, or without a broker group whose loss
    was accepted.

    The caller must have locked the operation's subject.
    """
    if not request.accept_loss:
        condition = operations.c.operation_id == operation_id
        connection.execute(sa.update(operations).where(condition).values(without_source=True))
        return
    partition_ids = sa.select(partitions.c.partition_id).where(
        partitions.c.broker_group == request.broker_group
    )
    lost_steps = sa.and_(
        steps.c.operation_id == operation_id, steps.c.partition_id.in_(partition_ids)
    )
    connection.execute(sa.update(steps).where(lost_steps).values(given_up=True))


def _refuse_hidden(request: Reshape, subject: SubjectRow) -> PlannedOperation:
    """Return the result of an evacuation for a hidden subject, which cannot move. Raises
    ConflictError if the broker group is alive.
    """
    if not (request.without_source or request.accept_loss):
        check_not_hidden(subject)
    problem = f"it is hidden until it is published in {subject.hidden_for!r}; delete it"
    busy = BusySubject(subject=subject.name, operation_id=0, problem=problem)
    return PlannedOperation(subject=subject, plan=EMPTY_PLAN, busy=busy)


def _plan_busy(
    connection: Connection, request: Reshape, subject: SubjectRow, running: int
) -> PlannedOperation:
    """Return the result of an evacuation for a subject with a running operation or an unfinished
    creation. Raises BusyError if the broker group is alive.
    """
    if not (request.without_source or request.accept_loss):
        if running:
            raise BusyError(Reason.OPERATION_RUNNING, subject=subject.name, operation_id=running)
        raise BusyError(
            Reason.CREATION_RUNNING, subject=subject.name, broker_group=request.broker_group
        )
    group_steps = connection.execute(
        sa.select(steps.c.action, steps.c.done, steps.c.partition_id)
        .join(partitions, partitions.c.partition_id == steps.c.partition_id)
        .where(steps.c.operation_id == running, partitions.c.broker_group == request.broker_group)
    ).all()
    opened = open_partitions(connection, subject)
    open_count = sum(partition.broker_group == request.broker_group for partition in opened)
    seal_count = sum(step.action == StepAction.SEAL for step in group_steps)
    hosted = [step.done for step in group_steps if step.action == StepAction.HOST]
    unsealed = [
        step.partition_id
        for step in group_steps
        if step.action == StepAction.SEAL and not step.done
    ]
    continued = 0
    problem = "another operation is running on it; evacuate again when that is done"
    if not running:
        problem = "it is still being created, with partitions on the broker group"
    elif not all(hosted):
        problem = (
            "its operation will open partitions on the broker group; cancel it, then evacuate again"
        )
    elif unsealed and not _may_continue(subject, request):
        problem = "it is strict or static; its operation waits until the broker group is back"
    elif unsealed or (request.accept_loss and hosted):
        continued = running
        problem = ""
        if request.accept_loss:
            _check_starts(subject, _child_names(connection, running))
        blocking = _is_sealed if request.accept_loss else _blocks_groups
        sealed = _blocking_partitions(
            connection, subject, BrokerGroup(request.broker_group), blocking
        )
        if hosted or seal_count < open_count or sealed:
            problem = (
                "its operation continues, but leaves partitions on the broker group; evacuate "
                "again when it is done"
            )
    busy = BusySubject(subject=subject.name, operation_id=running, problem=problem)
    return PlannedOperation(
        subject=subject,
        plan=EMPTY_PLAN,
        continued=continued,
        busy=busy if problem else None,
        losses=read_losses(connection, unsealed) if continued and request.accept_loss else (),
    )
