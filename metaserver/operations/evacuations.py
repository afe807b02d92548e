"""Plans evacuations: every subject with open or planned partitions on a broker group leaves it.
SQL, synchronous.

    the broker group answers    A running operation or creation on one subject refuses the whole
                                evacuation.

    the broker group is silent  Each subject is decided by itself. Its evacuation is planned; or its
    (without_source)            running operation continues without the broker group; or the subject
                                is reported as busy. Sealed partitions there are abandoned as well,
                                because they block groups that have not read them.

    the broker group is lost    As above, also for strict subjects. All partitions there are given
    (accept_loss)               up. The queue of a static subject continues above all offsets that
                                the lost partition can have.

Invariants
    Every open or planned partition of the broker group is either planned to leave or reported as
    busy. If the broker group is silent, the same holds for its sealed partitions that block a
    consumer group.
    An operation continues without its source only if the subject allows reordered messages, or an
    operator has accepted the loss.
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
from ..cluster.brokers import last_report, no_host, writable_groups
from ..cluster.losses import read_losses
from ..cluster.rows import SubjectRow
from ..cluster.subjects import check_not_hidden, find_subject
from ..sql.schema import drained, groups, operations, partitions, steps, subjects
from .plan import NOTHING, plan_evacuation
from .plan_inputs import (
    PlannedOperation,
    open_partitions,
    running_operation,
)
from .states import may_reorder

_COMING = (PartitionState.PLANNED, PartitionState.OPEN)
"""States of partitions that have to leave; a planned partition would open there although the group
is cordoned.
"""
_has_drained = sa.select(sa.literal(1)).where(
    drained.c.group_id == groups.c.group_id, drained.c.partition_id == partitions.c.partition_id
)
_not_drained = sa.select(sa.literal(1)).where(
    groups.c.subject_id == partitions.c.subject_id,
    sa.not_(sa.exists(_has_drained.correlate(groups, partitions))),
)
_blocking = sa.and_(
    partitions.c.state == PartitionState.SEALED,
    partitions.c.end_offset.is_not(None),
    sa.or_(
        sa.and_(subjects.c.order_strategy == OrderStrategy.BEST_TRIED, sa.not_(subjects.c.static)),
        sa.exists(_not_drained.correlate(partitions)),
    ),
)
"""
Sealed partitions that block consumer groups.

Subjects that allow reordered messages: all of them, because they also block future groups. Other
subjects: those that an existing group has not drained.
"""
_SEALED = partitions.c.state == PartitionState.SEALED


def plan_evacuations(connection: Connection, ask: Reshape) -> list[PlannedOperation]:
    """
    Plan the evacuation of each subject on the broker group, by name, and lock these subjects.

    Raises:
        InvalidRequestError, NotFoundError, UnavailableError
        InvalidRequestError: `without_source` or `accept_loss` is given and the broker group is not
            silent; or a queue of a static subject has no logic offsets left above the loss.
        BusyError: the broker group answers, and an operation or a
            creation runs on a subject.
    """
    source = BrokerGroup(ask.broker_group)
    check_name("broker group", source)
    left = ask.without_source or ask.accept_loss
    report = last_report(connection, source)
    if report.left_ms > 0 and left:
        raise InvalidRequestError(
            f"broker group {source!r} {report.age}, and counts as alive. If it is dead, "
            f"{report.ask_again}. If it "
            "answers, evacuate it without --without-source and --accept-loss: it "
            "seals, and order is kept"
        )
    coming = partitions.c.state.in_(_COMING)
    blocking = _SEALED if ask.accept_loss else _blocking
    concerned = (
        sa.select(subjects.c.name)
        .join(partitions, partitions.c.subject_id == subjects.c.subject_id)
        .where(partitions.c.broker_group == source, sa.or_(coming, blocking) if left else coming)
        .distinct()
        .order_by(subjects.c.name)
    )
    load = Counter(writable_groups(connection))
    plans = []
    for name in connection.execute(concerned).scalars().all():
        subject = find_subject(connection, name, lock=True)
        assert subject is not None
        if subject.hidden_for:
            plans.append(_hidden(ask, subject))
            continue
        running = running_operation(connection, subject.subject_id)
        if running is not None or subject.route_version == 0:
            plans.append(_not_free(connection, ask, subject, running or 0))
            continue
        try:
            plan = plan_evacuation(open_partitions(connection, subject), source, load)
        except UnavailableError as error:
            raise no_host(connection, excluded=source) from error
        load.update(child.broker_group for child in plan.children)
        sealed = _blocking_there(connection, subject, source, blocking) if left else ()
        busy = None
        if sealed and _may_continue(subject, ask):
            plan = replace(plan, sealed=plan.sealed + sealed)
        elif sealed:
            problem = (
                "it is strict or static; the children of the partitions sealed there wait until "
                "the broker group is back"
            )
            busy = BusySubject(subject=subject.name, operation_id=0, problem=problem)
        planned = PlannedOperation(subject=subject, plan=plan, busy=busy)
        if ask.accept_loss:
            planned = replace(planned, losses=read_losses(connection, plan.sealed))
            _check_starts(subject, [child.name for child in planned.children()])
        plans.append(planned)
    return plans


def _check_starts(subject: SubjectRow, names: Iterable[str]) -> None:
    """Check that logic offsets are left for children above a loss. Raises InvalidRequestError."""
    for name in names if subject.static else ():
        start_behind_loss(name)


def _may_continue(subject: SubjectRow, ask: Reshape) -> bool:
    """Return whether the subject's operations may continue without the silent broker group."""
    return may_reorder(subject.order_strategy, static=subject.static) or ask.accept_loss


def _blocking_there(
    connection: Connection,
    subject: SubjectRow,
    source: BrokerGroup,
    blocking: sa.ColumnElement[bool],
) -> tuple[PartitionId, ...]:
    """Return a subject's sealed partitions on a broker group that block consumer groups."""
    there = sa.and_(
        partitions.c.subject_id == subject.subject_id, partitions.c.broker_group == source
    )
    ids = sa.select(partitions.c.partition_id).join(subjects).where(there, blocking)
    return tuple(connection.execute(ids.order_by(partitions.c.partition_id)).scalars())


def _children_of(connection: Connection, operation_id: int) -> list[str]:
    """Return the names of an operation's children."""
    names = (
        sa.select(partitions.c.name)
        .join(steps, steps.c.partition_id == partitions.c.partition_id)
        .where(steps.c.operation_id == operation_id, steps.c.action == StepAction.HOST)
    )
    return list(connection.execute(names).scalars())


def continue_without(connection: Connection, operation_id: int, ask: Reshape) -> None:
    """
    Let a running operation continue without silent sources, or without a broker group whose loss is
    accepted.

    The caller has locked the operation's subject.
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


def _hidden(ask: Reshape, subject: SubjectRow) -> PlannedOperation:
    """Return the part of an evacuation for a hidden subject, which does not move. Raises
    ConflictError.
    """
    if not (ask.without_source or ask.accept_loss):
        check_not_hidden(subject)
    problem = f"it is hidden until it is published in {subject.hidden_for!r}; delete it"
    busy = BusySubject(subject=subject.name, operation_id=0, problem=problem)
    return PlannedOperation(subject=subject, plan=NOTHING, busy=busy)


def _not_free(
    connection: Connection, ask: Reshape, subject: SubjectRow, running: int
) -> PlannedOperation:
    """Return the part of an evacuation for a subject with a running operation or an unfinished
    creation.
    """
    if not (ask.without_source or ask.accept_loss):
        if running:
            raise BusyError(Reason.OPERATION_RUNNING, subject=subject.name, operation_id=running)
        raise BusyError(
            Reason.CREATION_RUNNING, subject=subject.name, broker_group=ask.broker_group
        )
    todo = connection.execute(
        sa.select(steps.c.action, steps.c.done, steps.c.partition_id)
        .join(partitions, partitions.c.partition_id == steps.c.partition_id)
        .where(steps.c.operation_id == running, partitions.c.broker_group == ask.broker_group)
    ).all()
    opened = open_partitions(connection, subject)
    there = sum(partition.broker_group == ask.broker_group for partition in opened)
    leaving = sum(step.action == StepAction.SEAL for step in todo)
    hosts = [step.done for step in todo if step.action == StepAction.HOST]
    waits = [step.partition_id for step in todo if step.action == StepAction.SEAL and not step.done]
    freed = 0
    problem = "another operation runs on it; evacuate again when that is done"
    if not running:
        problem = "it is still being created, with partitions there"
    elif not all(hosts):
        problem = "its operation waits to open partitions there; cancel it, then evacuate again"
    elif waits and not _may_continue(subject, ask):
        problem = "it is strict or static; its operation waits until the broker group is back"
    elif waits or (ask.accept_loss and hosts):
        freed = running
        problem = ""
        if ask.accept_loss:
            _check_starts(subject, _children_of(connection, running))
        blocking = _SEALED if ask.accept_loss else _blocking
        sealed = _blocking_there(connection, subject, BrokerGroup(ask.broker_group), blocking)
        if hosts or leaving < there or sealed:
            problem = (
                "its operation continues, and leaves partitions there; evacuate "
                "again when it is done"
            )
    busy = BusySubject(subject=subject.name, operation_id=running, problem=problem)
    return PlannedOperation(
        subject=subject,
        plan=NOTHING,
        freed=freed,
        busy=busy if problem else None,
        losses=read_losses(connection, waits) if freed and ask.accept_loss else (),
    )
