"""Plans of operations made from the rows, and journaled.  SQL around the deciders of `reshape.py`, synchronous.

Invariants
    An operation, the rows of its children, their parents and its steps are stored in one transaction.
    A subject has one running operation at most.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from ..protocol.errors import (
    BrokerCordonedError,
    InvalidRequestError,
    NotEnoughBrokersError,
    OperationRunningError,
    PartitionUnknownError,
    StaticSubjectError,
    SubjectUnknownError,
)
from ..protocol.ids import MAX_I64, BrokerGroup, PartitionId, PartitionName, QueueNumber, check_name
from ..protocol.operations import OperationKind, OperationState, OperationView, Reshape, StepAction
from ..protocol.routing import Partition, PartitionState
from .dialect import now_ms
from .reshape import (
    OpenPartition,
    Plan,
    plan_evacuation,
    plan_merge,
    plan_move,
    plan_resize,
    plan_split,
)
from .schema import operations, partition_parents, partitions, steps, subjects
from .store_brokers import broker_alive, cordon_broker, is_cordoned, writable_groups
from .store_subjects import SubjectRow, find_subject


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedOperation:
    """What an operation would do to one subject."""

    subject: SubjectRow
    named: int
    """How many names of partitions the subject has given so far."""
    plan: Plan

    def children(self) -> tuple[Partition, ...]:
        """The children with their names and queues to be; ids come with the rows."""
        found = []
        for number, child in enumerate(self.plan.children, self.named):
            queue = QueueNumber(number) if child.queue is None else child.queue
            found.append(
                Partition(
                    partition_id=PartitionId(0),
                    name=PartitionName(f"{self.subject.name}.p{number}"),
                    queue=queue,
                    range_start=child.range_start,
                    range_end=child.range_end,
                    broker_group=child.broker_group,
                    state=PartitionState.PLANNED,
                    parents=child.parents,
                )
            )
        return tuple(found)

    def view(self, ask: Reshape) -> OperationView:
        """The plan as it is shown before anything is stored."""
        return OperationView(
            operation_id=0,
            subject=self.subject.name,
            kind=ask.kind,
            state=OperationState.PLAN if self.plan.children else OperationState.DONE,
            sealed=self.plan.sealed,
            children=self.children(),
            without_source=ask.without_source,
        )


def plan_operations(connection: Connection, ask: Reshape) -> list[PlannedOperation]:
    """
    One plan for each subject concerned; those with nothing to do have an empty one.  Locks the subjects.

    Raises:
        InvalidNameError, InvalidRequestError, SubjectUnknownError, PartitionUnknownError
        BrokerGroupUnknownError: it never reported itself.
        NotEnoughBrokersError: nowhere to go now.
        BrokerCordonedError: the target of a move gets no new partitions.
        OperationRunningError: another operation on a subject has not come to its new route yet.
        StaticSubjectError: it would change the number of queues of a static subject.
    """
    if ask.kind is OperationKind.EVACUATE:
        return _plan_evacuation(connection, ask)
    hosts: Mapping[BrokerGroup, int] = writable_groups(connection)
    if ask.kind is OperationKind.RESIZE:
        subject = _free_subject(connection, ask.subject)
    else:
        subject = _free_subject(connection, _subject_of(connection, ask.partition_ids))
    return [_planned(connection, subject, _plan(connection, ask, subject, hosts))]


def _plan(
    connection: Connection, ask: Reshape, subject: SubjectRow, hosts: Mapping[BrokerGroup, int]
) -> Plan:
    if subject.static and ask.kind is not OperationKind.MOVE:
        raise StaticSubjectError(subject=subject.name, queues=subject.partitions_wanted)
    current = _open_partitions(connection, subject)
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
    Plan and journal; an evacuated broker group is cordoned from now on.  Driven by `driver` for `lease_ms`; with each plan the id of its operation, 0 without one.

    Raises:
        What `plan_operations` raises; then nothing is stored.
    """
    begun = []
    if ask.kind is OperationKind.EVACUATE:
        cordon_broker(connection, ask.broker_group, True)
    for planned in plan_operations(connection, ask):
        operation_id = 0
        if planned.plan.children:
            operation_id = _journal(connection, ask, planned, driver=driver, lease_ms=lease_ms)
        begun.append((operation_id, planned))
    return begun


def _plan_evacuation(connection: Connection, ask: Reshape) -> list[PlannedOperation]:
    source = BrokerGroup(ask.broker_group)
    check_name("broker group", source)
    if broker_alive(connection, source) and ask.without_source:
        raise InvalidRequestError(
            f"broker group {source!r} answers: evacuate it with its help, which loses no order"
        )
    found = (
        sa.select(subjects.c.name)
        .join(partitions, partitions.c.subject_id == subjects.c.subject_id)
        .where(partitions.c.broker_group == source, partitions.c.state == PartitionState.OPEN)
        .distinct()
        .order_by(subjects.c.name)
    )
    load = Counter(writable_groups(connection))
    plans = []
    for name in connection.execute(found).scalars().all():
        subject = _free_subject(connection, name)
        plan = plan_evacuation(_open_partitions(connection, subject), source, load)
        load.update(child.broker_group for child in plan.children)
        plans.append(_planned(connection, subject, plan))
    return plans


def _planned(connection: Connection, subject: SubjectRow, plan: Plan) -> PlannedOperation:
    named = sa.select(subjects.c.partitions_named).where(
        subjects.c.subject_id == subject.subject_id
    )
    return PlannedOperation(
        subject=subject, named=connection.execute(named).scalar_one(), plan=plan
    )


def _subject_of(connection: Connection, ids: tuple[int, ...]) -> str:
    """The subject of the first of these partitions."""
    known = None
    if ids and 0 < ids[0] <= MAX_I64:
        found = (
            sa.select(subjects.c.name)
            .join(partitions, partitions.c.subject_id == subjects.c.subject_id)
            .where(partitions.c.partition_id == ids[0])
        )
        known = connection.execute(found).scalar_one_or_none()
    if known is None:
        which = f"no partition {ids[0]}" if ids else "no partition given"
        raise PartitionUnknownError(which)
    return str(known)


def _free_subject(connection: Connection, name: str) -> SubjectRow:
    row = find_subject(connection, name, lock=True)
    if row is None or row.route_version == 0:
        raise SubjectUnknownError(subject=name)
    running = sa.select(operations.c.operation_id).where(operations.c.running == row.subject_id)
    found = connection.execute(running).scalar_one_or_none()
    if found is not None:
        raise OperationRunningError(subject=name, operation_id=found)
    return row


def _open_partitions(connection: Connection, subject: SubjectRow) -> list[OpenPartition]:
    rows = connection.execute(
        sa.select(partitions)
        .where(
            partitions.c.subject_id == subject.subject_id,
            partitions.c.state == PartitionState.OPEN,
        )
        .order_by(partitions.c.range_start)
    )
    return [
        OpenPartition(
            partition_id=PartitionId(row.partition_id),
            range_start=row.range_start,
            range_end=row.range_end,
            broker_group=BrokerGroup(row.broker_group),
            queue=QueueNumber(row.queue),
        )
        for row in rows
    ]


def _check_target(
    connection: Connection, target: BrokerGroup, hosts: Mapping[BrokerGroup, int]
) -> None:
    check_name("broker group", target)
    alive = broker_alive(connection, target)
    if is_cordoned(connection, target):
        raise BrokerCordonedError(
            f"broker group {target!r} is cordoned: it gets no new partitions", broker_group=target
        )
    if not alive:
        raise NotEnoughBrokersError(f"broker group {target!r} is silent", broker_group=target)
    if target not in hosts:
        raise NotEnoughBrokersError(
            f"broker group {target!r} takes no writes now", broker_group=target
        )


def _journal(
    connection: Connection, ask: Reshape, planned: PlannedOperation, *, driver: str, lease_ms: int
) -> int:
    subject_id = planned.subject.subject_id
    operation_id: int = connection.execute(
        sa.insert(operations)
        .values(
            subject_id=subject_id,
            kind=ask.kind,
            state=OperationState.PLAN,
            without_source=ask.without_source,
            problem="",
            running=subject_id,
            driver=driver,
            driven_until=now_ms() + lease_ms,
        )
        .returning(operations.c.operation_id)
    ).scalar_one()
    todo = [(one, StepAction.SEAL) for one in planned.plan.sealed]
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
        parents = [{"partition_id": partition_id, "parent_id": one} for one in child.parents]
        connection.execute(sa.insert(partition_parents), parents)
        todo.append((partition_id, StepAction.HOST))
    rows = [
        {"operation_id": operation_id, "partition_id": one, "action": action, "done": False}
        for one, action in todo
    ]
    connection.execute(sa.insert(steps), rows)
    connection.execute(
        sa.update(subjects)
        .where(subjects.c.subject_id == subject_id)
        .values(partitions_named=planned.named + len(planned.plan.children))
    )
    return operation_id
