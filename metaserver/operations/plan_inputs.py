"""Reads the inputs of a plan: a subject without a running operation, and its open partitions. SQL,
synchronous.
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
    freed: int = 0
    """Id of a running operation that waited for the evacuated broker group and now continues
    without it; else 0.
    """
    busy: BusySubject | None = None
    """Reason why an evacuation leaves partitions of the subject on the broker group, or blocked."""
    losses: tuple[LossView, ...] = ()
    """Partitions that are given up with a lost broker group."""

    def children(self) -> tuple[Partition, ...]:
        """Return the children with their names and queues; their ids are 0 until their rows are
        stored.
        """
        planned = []
        for number, child in enumerate(self.plan.children, self.subject.partitions_named):
            queue = QueueNumber(number) if child.queue is None else child.queue
            planned.append(
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
        return tuple(planned)

    def view(self, ask: Reshape) -> OperationView:
        """Return the plan as an operation that is not stored yet."""
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


def free_subject(connection: Connection, name: str) -> SubjectRow:
    """
    Return an open subject without a running operation, and lock it until the transaction ends.

    Raises:
        InvalidRequestError, SubjectUnknownError, ConflictError, UnavailableError,
        BusyError
    """
    row = check_open(connection, name, find_subject(connection, name, lock=True))
    check_not_hidden(row)
    running = running_operation(connection, row.subject_id)
    if running is not None:
        raise BusyError(Reason.OPERATION_RUNNING, subject=name, operation_id=running)
    return row


def running_operation(connection: Connection, subject_id: int) -> int | None:
    """Return the id of the subject's running operation, which has not changed the route yet, or
    None.
    """
    running = sa.select(operations.c.operation_id).where(operations.c.running == subject_id)
    return connection.execute(running).scalar_one_or_none()


def open_partitions(connection: Connection, subject: SubjectRow) -> list[OpenPartition]:
    """Return the open partitions of a subject, by range."""
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
