"""Builds the API's views of operations and of a subject's lineage. Runs SQL synchronously."""

from __future__ import annotations

from collections.abc import Collection

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from ...protocol.operations import (
    OperationKind,
    OperationState,
    OperationView,
    PartitionHistory,
    StepAction,
    StepView,
    SubjectHistory,
)
from ..cluster.losses import read_losses
from ..cluster.partitions import BY_ID, PartitionFilter, read_partitions
from ..cluster.subjects import open_subject_row
from ..cluster.unfinished import UNFINISHED_STATES
from ..sql.dialect import begin_snapshot
from ..sql.schema import brokers, operations, partition_parents, partitions, steps, subjects
from .states import split_parents_and_children

OPERATIONS_SHOWN_MAX = 100
_WAITING_STATES = tuple(
    state for state in UNFINISHED_STATES if state is not OperationState.CANCELED
)


def subject_operations(connection: Connection, name: str) -> list[OperationView]:
    """Return the latest operations of a subject, newest first. Raises SubjectUnknownError."""
    row = open_subject_row(connection, name)
    query = (
        sa.select(operations.c.operation_id)
        .where(operations.c.subject_id == row.subject_id)
        .order_by(operations.c.operation_id.desc())
        .limit(OPERATIONS_SHOWN_MAX)
    )
    return operation_views(connection, connection.execute(query).scalars().all())


def waiting_operations(connection: Connection) -> list[OperationView]:
    """Return the latest operations of all subjects that wait, newest first."""
    query = (
        sa.select(operations.c.operation_id)
        .where(operations.c.state.in_(_WAITING_STATES), operations.c.problem != "")
        .order_by(operations.c.operation_id.desc())
        .limit(OPERATIONS_SHOWN_MAX)
    )
    return operation_views(connection, connection.execute(query).scalars().all())


_operations_query = (
    sa.select(operations, subjects.c.name)
    .join(subjects, subjects.c.subject_id == operations.c.subject_id)
    .where(operations.c.operation_id.in_(sa.bindparam("ids")))
    .order_by(operations.c.operation_id.desc())
)


def operation_views(connection: Connection, ids: Collection[int]) -> list[OperationView]:
    """Return the views of these operations, newest first."""
    rows = connection.execute(_operations_query, {"ids": list(ids)}).all()
    return [_build_view(connection, row) for row in rows]


_steps_query = (
    sa.select(
        steps,
        partitions.c.broker_group,
        partitions.c.end_offset,
        partitions.c.abandoned,
        partitions.c.lost,
    )
    .join(partitions, partitions.c.partition_id == steps.c.partition_id)
    .where(steps.c.operation_id == sa.bindparam("of_operation"))
    .order_by(steps.c.action, steps.c.partition_id)
)


def _build_view(connection: Connection, row: sa.Row[tuple[object, ...]]) -> OperationView:
    step_rows = connection.execute(_steps_query, {"of_operation": row.operation_id}).all()
    state = OperationState(row.state)
    sealed_ids, children = split_parents_and_children(
        state, ((step.partition_id, StepAction(step.action)) for step in step_rows)
    )
    steps_by_partition = {step.partition_id: step for step in step_rows}
    cordoned_group = ""
    if row.kind == OperationKind.EVACUATE:
        cordoned_group = _cordoned_source(connection, children, sealed_ids)
    return OperationView(
        operation_id=row.operation_id,
        subject=row.name,
        kind=OperationKind(row.kind),
        state=state,
        sealed=tuple(sealed_ids),
        children=read_partitions(connection, BY_ID, ids=children),
        steps=tuple(
            StepView(
                action=StepAction(step.action),
                partition_id=step.partition_id,
                broker_group=step.broker_group,
                done=step.done,
                end_offset=step.end_offset,
            )
            for step in step_rows
        ),
        without_source=row.without_source,
        reordered=tuple(
            partition_id
            for partition_id in sealed_ids
            if steps_by_partition[partition_id].abandoned
        ),
        problem=row.problem,
        waiting_since_ms=row.waiting_since,
        losses=read_losses(
            connection,
            [partition_id for partition_id in sealed_ids if steps_by_partition[partition_id].lost],
            is_done=True,
        ),
        cordoned=cordoned_group,
    )


def _cordoned_source(
    connection: Connection, child_partition_ids: Collection[int], sealed_ids: Collection[int]
) -> str:
    """Return the broker group that is being evacuated, if it is still cordoned, or ""."""
    parents = sa.select(partition_parents.c.parent_id).where(
        partition_parents.c.partition_id.in_(child_partition_ids)
    )
    is_source = sa.or_(
        partitions.c.partition_id.in_(sealed_ids), partitions.c.partition_id.in_(parents)
    )
    query = (
        sa.select(brokers.c.broker_group)
        .join(partitions, partitions.c.broker_group == brokers.c.broker_group)
        .where(is_source, brokers.c.cordoned)
    )
    return connection.execute(query.limit(1)).scalar_one_or_none() or ""


def subject_history(connection: Connection, name: str) -> SubjectHistory:
    """Return every partition that a subject has ever had, except children of canceled operations.
    Raises SubjectUnknownError.
    """
    begin_snapshot(connection)
    row = open_subject_row(connection, name)
    canceled_query = (
        sa.select(steps.c.partition_id)
        .join(operations, operations.c.operation_id == steps.c.operation_id)
        .where(operations.c.state == OperationState.CANCELED)
    )
    is_in_subject = sa.and_(
        partitions.c.subject_id == row.subject_id, partitions.c.partition_id.not_in(canceled_query)
    )
    rows_by_id = {
        row.partition_id: row
        for row in connection.execute(
            sa.select(
                partitions.c.partition_id,
                partitions.c.end_offset,
                partitions.c.abandoned,
                partitions.c.lost,
                partitions.c.opened_at,
            ).where(is_in_subject)
        )
    }
    return SubjectHistory(
        subject=row.name,
        route_version=row.route_version,
        partitions=[
            PartitionHistory(
                partition=partition,
                end_offset=rows_by_id[partition.partition_id].end_offset,
                abandoned=rows_by_id[partition.partition_id].abandoned,
                lost=rows_by_id[partition.partition_id].lost,
                opened_ms=rows_by_id[partition.partition_id].opened_at,
            )
            for partition in read_partitions(connection, PartitionFilter(is_in_subject))
        ],
    )
