"""Plans that leave a broker group, in every subject that has partitions there or on their way there.  SQL, synchronous.

    the broker group answers     an operation or a creation on one subject refuses the whole evacuation
    it is silent                 each subject by itself: its evacuation is planned; or its running operation, which waits
    (without_source)             for the group, continues without it; or it is reported as busy.  Partitions that are
                                 sealed there block groups that have not read them, so they are abandoned as well
    it is gone for good          the same, also for strict subjects, and everything there is given up; a static
    (accept_loss)                subject's queue continues above all offsets that the lost partition can have had

Invariants
    Every partition that is open or planned there is either planned to leave or reported; so is every sealed one that a
    consumer group waits for, if the group is left without its help.
    An operation continues without its source only if the subject allows reordered messages, or an operator has accepted
    the loss.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from ...protocol.errors import CreationRunningError, InvalidRequestError, OperationRunningError
from ...protocol.ids import BrokerGroup, PartitionId, check_name
from ...protocol.operations import BusySubject, Reshape, StepAction
from ...protocol.queues import start_behind_loss
from ...protocol.routing import OrderStrategy, PartitionState
from ..cluster.brokers import broker_alive, writable_groups
from ..cluster.losses import read_losses
from ..cluster.rows import SubjectRow
from ..cluster.subjects import find_subject
from ..sql.schema import drained, groups, operations, partitions, steps, subjects
from .plan import NOTHING, plan_evacuation
from .plan_inputs import (
    PlannedOperation,
    open_partitions,
    running_operation,
)
from .states import may_reorder

_COMING = (PartitionState.PLANNED, PartitionState.OPEN)
"""The states of partitions that have to leave: a planned one would open there, cordoned or not."""
_through = sa.select(sa.literal(1)).where(
    drained.c.group_id == groups.c.group_id, drained.c.partition_id == partitions.c.partition_id
)
_behind = sa.select(sa.literal(1)).where(
    groups.c.subject_id == partitions.c.subject_id,
    sa.not_(sa.exists(_through.correlate(groups, partitions))),
)
_blocking = sa.and_(
    partitions.c.state == PartitionState.SEALED,
    partitions.c.end_offset.is_not(None),
    sa.or_(
        sa.and_(subjects.c.order_strategy == OrderStrategy.BEST_TRIED, sa.not_(subjects.c.static)),
        sa.exists(_behind.correlate(partitions)),
    ),
)
"""Sealed partitions that block consumer groups: present and future ones if messages may be reordered, else present ones."""
_SEALED = partitions.c.state == PartitionState.SEALED


def plan_evacuations(connection: Connection, ask: Reshape) -> list[PlannedOperation]:
    """
    Plan the evacuation of each subject concerned, by name.  Locks the subjects.

    Raises:
        InvalidNameError, BrokerGroupUnknownError, NotEnoughBrokersError
        InvalidRequestError: the broker group answers, and is to be left without its help; or its loss is accepted, and a
            static subject has no logic offsets left behind that loss.
        OperationRunningError, CreationRunningError: the broker group helps, and a subject is not free.
    """
    source = BrokerGroup(ask.broker_group)
    check_name("broker group", source)
    left = ask.without_source or ask.accept_loss
    if broker_alive(connection, source) and left:
        raise InvalidRequestError(
            f"broker group {source!r} answers: evacuate it with its help, which loses no order"
        )
    coming = partitions.c.state.in_(_COMING)
    blocking = _SEALED if ask.accept_loss else _blocking
    found = (
        sa.select(subjects.c.name)
        .join(partitions, partitions.c.subject_id == subjects.c.subject_id)
        .where(partitions.c.broker_group == source, sa.or_(coming, blocking) if left else coming)
        .distinct()
        .order_by(subjects.c.name)
    )
    load = Counter(writable_groups(connection))
    plans = []
    for name in connection.execute(found).scalars().all():
        subject = find_subject(connection, name, lock=True)
        assert subject is not None
        running = running_operation(connection, subject.subject_id)
        if running is not None or subject.route_version == 0:
            plans.append(_not_free(connection, ask, subject, running or 0))
            continue
        plan = plan_evacuation(open_partitions(connection, subject), source, load)
        load.update(child.broker_group for child in plan.children)
        sealed = _blocking_there(connection, subject, source, blocking) if left else ()
        busy = None
        if sealed and _may_continue(subject, ask):
            plan = replace(plan, sealed=plan.sealed + sealed)
        elif sealed:
            problem = "it is strict or static; what continues what is sealed there is held until the broker group is back"
            busy = BusySubject(subject=subject.name, operation_id=0, problem=problem)
        planned = PlannedOperation(subject=subject, plan=plan, busy=busy)
        if ask.accept_loss:
            planned = replace(planned, losses=read_losses(connection, plan.sealed))
            _check_starts(subject, [child.name for child in planned.children()])
        plans.append(planned)
    return plans


def _check_starts(subject: SubjectRow, names: Iterable[str]) -> None:
    """Check that children can begin behind a loss.  Raises InvalidRequestError: no logic offsets are left."""
    for name in names if subject.static else ():
        start_behind_loss(name)


def _may_continue(subject: SubjectRow, ask: Reshape) -> bool:
    """Whether the subject's operations may continue without a silent broker."""
    return may_reorder(subject.order_strategy, static=subject.static) or ask.accept_loss


def _blocking_there(
    connection: Connection,
    subject: SubjectRow,
    source: BrokerGroup,
    blocking: sa.ColumnElement[bool],
) -> tuple[PartitionId, ...]:
    """The sealed partitions of a subject on a broker group that block consumer groups."""
    there = sa.and_(
        partitions.c.subject_id == subject.subject_id, partitions.c.broker_group == source
    )
    found = sa.select(partitions.c.partition_id).join(subjects).where(there, blocking)
    return tuple(connection.execute(found.order_by(partitions.c.partition_id)).scalars())


def _children_of(connection: Connection, operation_id: int) -> list[str]:
    """The names of an operation's children."""
    found = (
        sa.select(partitions.c.name)
        .join(steps, steps.c.partition_id == partitions.c.partition_id)
        .where(steps.c.operation_id == operation_id, steps.c.action == StepAction.HOST)
    )
    return list(connection.execute(found).scalars())


def continue_without(connection: Connection, operation_id: int, ask: Reshape) -> None:
    """
    Let a running operation continue without silent sources, or without the broker group whose loss is accepted.

    Its subject is locked.
    """
    if not ask.accept_loss:
        here = operations.c.operation_id == operation_id
        connection.execute(sa.update(operations).where(here).values(without_source=True))
        return
    there = sa.select(partitions.c.partition_id).where(
        partitions.c.broker_group == ask.broker_group
    )
    given_up = sa.and_(steps.c.operation_id == operation_id, steps.c.partition_id.in_(there))
    connection.execute(sa.update(steps).where(given_up).values(given_up=True))


def _not_free(
    connection: Connection, ask: Reshape, subject: SubjectRow, running: int
) -> PlannedOperation:
    """The part of an evacuation that concerns a subject with a running operation or an unfinished creation."""
    if not (ask.without_source or ask.accept_loss):
        if running:
            raise OperationRunningError(subject=subject.name, operation_id=running)
        raise CreationRunningError(subject=subject.name, broker_group=ask.broker_group)
    todo = connection.execute(
        sa.select(steps.c.action, steps.c.done, steps.c.partition_id)
        .join(partitions, partitions.c.partition_id == steps.c.partition_id)
        .where(steps.c.operation_id == running, partitions.c.broker_group == ask.broker_group)
    ).all()
    found = open_partitions(connection, subject)
    there = sum(one.broker_group == ask.broker_group for one in found)
    leaving = sum(one.action == StepAction.SEAL for one in todo)
    hosts = [one.done for one in todo if one.action == StepAction.HOST]
    waits = [one.partition_id for one in todo if one.action == StepAction.SEAL and not one.done]
    freed = 0
    problem = "another operation runs on it; evacuate again when that is done"
    if not running:
        problem = "it is still being created, with partitions there"
    elif not all(hosts):
        problem = "its operation waits to open partitions there; cancel it, then evacuate again"
    elif waits and not _may_continue(subject, ask):
        problem = "it is strict or static; its operation is held until the broker group is back"
    elif waits or (ask.accept_loss and hosts):
        freed = running
        problem = ""
        if ask.accept_loss:
            _check_starts(subject, _children_of(connection, running))
        blocking = _SEALED if ask.accept_loss else _blocking
        sealed = _blocking_there(connection, subject, BrokerGroup(ask.broker_group), blocking)
        if hosts or leaving < there or sealed:
            problem = "its operation goes on, and leaves some there; then evacuate again"
    busy = BusySubject(subject=subject.name, operation_id=running, problem=problem)
    return PlannedOperation(
        subject=subject,
        plan=NOTHING,
        freed=freed,
        busy=busy if problem else None,
        losses=read_losses(connection, waits) if freed and ask.accept_loss else (),
    )
