"""What a plan is made from: a subject that is free for it, its open partitions, the names it will give.  SQL, synchronous."""

from __future__ import annotations

from dataclasses import dataclass

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from ...protocol.errors import OperationRunningError
from ...protocol.ids import BrokerGroup, PartitionId, PartitionName, QueueNumber
from ...protocol.operations import (
    BusySubject,
    LossView,
    OperationState,
    OperationView,
    Reshape,
)
from ...protocol.routing import Partition, PartitionState
from ..cluster.subjects import SubjectRow, check_open, find_subject
from ..sql.schema import operations, partitions, subjects
from .plan import OpenPartition, Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedOperation:
    """What an operation would do to one subject."""

    subject: SubjectRow
    named: int
    """How many names of partitions the subject has given so far."""
    plan: Plan
    freed: int = 0
    """An operation that runs already, waits for the broker group to be left, and now goes on without it."""
    busy: BusySubject | None = None
    """Why an evacuation leaves something of the subject where it is, or held."""
    losses: tuple[LossView, ...] = ()
    """What is given up, of a broker group that never comes back."""

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
            state=OperationState.PLAN if self.plan.sealed else OperationState.DONE,
            sealed=self.plan.sealed,
            children=self.children(),
            without_source=ask.without_source or ask.accept_loss,
            losses=self.losses,
        )


def planned_operation(connection: Connection, subject: SubjectRow, plan: Plan) -> PlannedOperation:
    """A plan together with the names that its children get."""
    named = sa.select(subjects.c.partitions_named).where(
        subjects.c.subject_id == subject.subject_id
    )
    return PlannedOperation(
        subject=subject, named=connection.execute(named).scalar_one(), plan=plan
    )


def free_subject(connection: Connection, name: str) -> SubjectRow:
    """
    An open subject on which nothing runs; it stays so until the transaction ends.

    Raises:
        InvalidNameError, SubjectUnknownError, CreationFailedError, DatabaseEmptyError, OperationRunningError
    """
    row = check_open(connection, name, find_subject(connection, name, lock=True))
    running = running_operation(connection, row.subject_id)
    if running is not None:
        raise OperationRunningError(subject=name, operation_id=running)
    return row


def running_operation(connection: Connection, subject_id: int) -> int | None:
    """The operation whose route is still to come, if there is one."""
    running = sa.select(operations.c.operation_id).where(operations.c.running == subject_id)
    return connection.execute(running).scalar_one_or_none()


def open_partitions(connection: Connection, subject: SubjectRow) -> list[OpenPartition]:
    """The open partitions of a subject, by range."""
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
