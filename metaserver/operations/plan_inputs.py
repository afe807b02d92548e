"""Reads the inputs of a plan: a subject without a running operation, and its open partitions. Runs
SQL synchronously.
"""

from __future__ import annotations

from dataclasses import dataclass

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from ...protocol.errors import BusyError, Reason
from ...protocol.ids import BrokerGroup, PartitionId, QueueNumber, partition_name
from ...protocol.operations import (
    BusySubject,
    LossView,
    OperationState,
    OperationView,
    Reshape,
)
from ...protocol.routing import Partition, PartitionState
from ..cluster.rows import SubjectRow
from ..cluster.subjects import check_not_hidden, check_open, find_subject
from ..sql.schema import operations, partitions
from .plan import OpenPartition, Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedOperation:
    """A planned operation on one subject."""

    subject: SubjectRow
    plan: Plan
    continued_id: int = 0
    """Id of a running operation that was waiting for the evacuated broker group and now continues
    without it, or 0.
    """
    busy_subject: BusySubject | None = None
    """Set if an evacuation leaves partitions on the broker group or leaves partitions blocked."""
    losses: tuple[LossView, ...] = ()
    """Losses of the partitions that are given up together with a lost broker group."""

    def children(self) -> tuple[Partition, ...]:
        """Return the children with their names and queues. Their ids are 0, because they have not
        been stored yet.
        """
        planned_partitions = []
        for number, child in enumerate(self.plan.children, self.subject.partitions_named):
            queue = QueueNumber(number) if child.queue is None else child.queue
            planned_partitions.append(
                Partition(
                    partition_id=PartitionId(0),
                    name=partition_name(self.subject.name, number),
                    queue=queue,
                    range_start=child.range_start,
                    range_end=child.range_end,
                    broker_group=child.broker_group,
                    state=PartitionState.PLANNED,
                    parents=child.parents,
                )
            )
        return tuple(planned_partitions)

    def view(self, request: Reshape) -> OperationView:
        """Return the plan in the form of an operation that has not been stored yet."""
        return OperationView(
            operation_id=0,
            subject=self.subject.name,
            kind=request.kind,
            state=OperationState.PLAN if self.plan.sealed else OperationState.DONE,
            sealed=self.plan.sealed,
            children=self.children(),
            without_source=request.without_source or request.accept_loss,
            losses=self.losses,
        )


def lock_idle_subject(connection: Connection, name: str) -> SubjectRow:
    """
    Lock an open subject until the transaction ends and check that no operation is running on it.

    Raises:
        InvalidRequestError, SubjectUnknownError, ConflictError, UnavailableError,
        BusyError
    """
    row = check_open(connection, name, find_subject(connection, name, lock=True))
    check_not_hidden(row)
    running_id = running_operation(connection, row.subject_id)
    if running_id is not None:
        raise BusyError(Reason.OPERATION_RUNNING, subject=name, operation_id=running_id)
    return row


def running_operation(connection: Connection, subject_id: int) -> int | None:
    """Return the id of the subject's operation that has not yet changed the route, or None."""
    query = sa.select(operations.c.operation_id).where(operations.c.running == subject_id)
    return connection.execute(query).scalar_one_or_none()


def open_partitions(connection: Connection, subject: SubjectRow) -> list[OpenPartition]:
    """Return the open partitions of a subject, ordered by range."""
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
