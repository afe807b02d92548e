"""Plans that leave a broker group, in every subject that has partitions there or on their way there.  SQL, synchronous.

    the broker group answers     any subject on which something runs refuses the whole evacuation: again later
    it is gone for good          the same, and what only it had is given up: also of strict subjects, and all that is
    (accept_loss)                sealed there; a static subject's queue goes on above all offsets that it can have had
    it is silent, and left       each subject by itself: planned; or what runs there and waits for the group is let
    behind (without_source)      go on without it; or told as busy, with what it waits for.  What is sealed there
                                 holds whoever has not read it: that is planned to be abandoned as well

Invariants
    Nothing that is open there, or planned to be, is passed over without a word; nor, where the group is left behind,
    what a consumer group waits for there.
    An operation goes on without its source only where the subject allows messages to be reordered, or an operator has
    accepted the loss of what is there.
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
from ..cluster.subjects import SubjectRow, find_subject
from ..sql.schema import drained, groups, operations, partitions, steps, subjects
from .plan import NOTHING, plan_evacuation
from .plan_inputs import (
    PlannedOperation,
    open_partitions,
    planned_operation,
    running_operation,
)
from .states import may_reorder

_COMING = (PartitionState.PLANNED, PartitionState.OPEN)
"""What has to leave: a planned partition is opened there, whether its broker group is cordoned or not."""
_through = sa.select(sa.literal(1)).where(
    drained.c.group_id == groups.c.group_id, drained.c.partition_id == partitions.c.partition_id
)
_behind = sa.select(sa.literal(1)).where(
    groups.c.subject_id == partitions.c.subject_id,
    sa.not_(sa.exists(_through.correlate(groups, partitions))),
)
_holding = sa.and_(
    partitions.c.state == PartitionState.SEALED,
    partitions.c.end_offset.is_not(None),
    sa.or_(
        sa.and_(subjects.c.order_strategy == OrderStrategy.BEST_TRIED, sa.not_(subjects.c.static)),
        sa.exists(_behind.correlate(partitions)),
    ),
)
"""What is sealed and holds up whoever has not read it to its end: groups to come, where that can be helped, else those
there are."""
_SEALED = partitions.c.state == PartitionState.SEALED


def plan_evacuations(connection: Connection, ask: Reshape) -> list[PlannedOperation]:
    """
    One for each subject concerned, by name.  Locks the subjects.

    Raises:
        InvalidNameError, BrokerGroupUnknownError, NotEnoughBrokersError
        InvalidRequestError: without its help, although it answers; or its loss is accepted, and the logic offsets of a
            static subject end there.
        OperationRunningError, CreationRunningError: with its help, and a subject is not free.
    """
    source = BrokerGroup(ask.broker_group)
    check_name("broker group", source)
    left = ask.without_source or ask.accept_loss
    if broker_alive(connection, source) and left:
        raise InvalidRequestError(
            f"broker group {source!r} answers: evacuate it with its help, which loses no order"
        )
    coming = partitions.c.state.in_(_COMING)
    holding_up = _SEALED if ask.accept_loss else _holding
    found = (
        sa.select(subjects.c.name)
        .join(partitions, partitions.c.subject_id == subjects.c.subject_id)
        .where(partitions.c.broker_group == source, sa.or_(coming, holding_up) if left else coming)
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
        holding = _holding_there(connection, subject, source, holding_up) if left else ()
        busy = None
        if holding and _goes_on(subject, ask):
            plan = replace(plan, sealed=plan.sealed + holding)
        elif holding:
            problem = "it is strict or static; what continues what is sealed there is held until the broker group is back"
            busy = BusySubject(subject=subject.name, operation_id=0, problem=problem)
        planned = replace(planned_operation(connection, subject, plan), busy=busy)
        if ask.accept_loss:
            planned = replace(planned, losses=read_losses(connection, plan.sealed))
            _check_starts(subject, [child.name for child in planned.children()])
        plans.append(planned)
    return plans


def _check_starts(subject: SubjectRow, names: Iterable[str]) -> None:
    """Let children pass that can begin behind a loss.  Raises InvalidRequestError: logic offsets end there."""
    for name in names if subject.static else ():
        start_behind_loss(name)


def _goes_on(subject: SubjectRow, ask: Reshape) -> bool:
    """Does the subject go on without what is on a silent broker."""
    return may_reorder(subject.order_strategy, static=subject.static) or ask.accept_loss


def _holding_there(
    connection: Connection,
    subject: SubjectRow,
    source: BrokerGroup,
    holding_up: sa.ColumnElement[bool],
) -> tuple[PartitionId, ...]:
    """The sealed partitions of a subject on a broker group that hold up consumer groups."""
    there = sa.and_(
        partitions.c.subject_id == subject.subject_id, partitions.c.broker_group == source
    )
    found = sa.select(partitions.c.partition_id).join(subjects).where(there, holding_up)
    return tuple(connection.execute(found.order_by(partitions.c.partition_id)).scalars())


def _children_of(connection: Connection, operation_id: int) -> list[str]:
    """The names of an operation's children."""
    found = (
        sa.select(partitions.c.name)
        .join(steps, steps.c.partition_id == partitions.c.partition_id)
        .where(steps.c.operation_id == operation_id, steps.c.action == StepAction.HOST)
    )
    return list(connection.execute(found).scalars())


def let_go_on(connection: Connection, operation_id: int, ask: Reshape) -> None:
    """
    A running operation waits no longer for silent sources, or for the broker group whose loss is accepted.

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
    """What becomes of a subject on which something runs."""
    if not (ask.without_source or ask.accept_loss):
        if running:
            raise OperationRunningError(subject=subject.name, operation_id=running)
        raise CreationRunningError(subject=subject.name, broker_group=ask.broker_group)
    todo = connection.execute(
        sa.select(steps.c.action, steps.c.done)
        .join(partitions, partitions.c.partition_id == steps.c.partition_id)
        .where(steps.c.operation_id == running, partitions.c.broker_group == ask.broker_group)
    ).all()
    found = open_partitions(connection, subject)
    there = sum(one.broker_group == ask.broker_group for one in found)
    leaving = sum(one.action == StepAction.SEAL for one in todo)
    hosts = [one.done for one in todo if one.action == StepAction.HOST]
    waits = any(one.action == StepAction.SEAL and not one.done for one in todo)
    freed = 0
    problem = "another operation runs on it; evacuate again when that is done"
    if not running:
        problem = "it is still being created, with partitions there"
    elif not all(hosts):
        problem = "its operation waits to open partitions there; cancel it, then evacuate again"
    elif waits and not _goes_on(subject, ask):
        problem = "it is strict or static; its operation is held until the broker group is back"
    elif waits or (ask.accept_loss and hosts):
        freed = running
        problem = ""
        if ask.accept_loss:
            _check_starts(subject, _children_of(connection, running))
        holding_up = _SEALED if ask.accept_loss else _holding
        holding = _holding_there(connection, subject, BrokerGroup(ask.broker_group), holding_up)
        if hosts or leaving < there or holding:
            problem = "its operation goes on, and leaves some there; then evacuate again"
    busy = BusySubject(subject=subject.name, operation_id=running, problem=problem)
    return PlannedOperation(
        subject=subject, named=0, plan=NOTHING, freed=freed, busy=busy if problem else None
    )
