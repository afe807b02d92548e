"""Replans subject creations that cannot continue, or marks them as failed. Runs SQL synchronously.

    PLANNED on a silent broker ─▶ EXPIRED, sealed there by a canceled operation
                               └▶ PLANNED elsewhere, under a new id and a new name

Invariants
    An id that may have been sent to a broker is never reused for another partition.
    A subject that is already open is not changed.
    If a broker permanently refuses a partition, the creation fails: its name can be used again, and
    the partitions that are already hosted are sealed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from ...protocol.ids import partition_name
from ...protocol.operations import OperationKind, OperationState, StepAction
from ...protocol.routing import PartitionState
from ..cluster.brokers import lock_brokers, writable_groups
from ..sql.dialect import now_ms
from ..sql.schema import brokers, operations, partitions, steps, subjects

PROBLEM_CHARS_MAX = 1_024
_creation = (
    sa.select(subjects.c.name, subjects.c.partitions_named)
    .where(subjects.c.subject_id == sa.bindparam("of_subject"), subjects.c.route_version == 0)
    .with_for_update()
)
_not_hidden = _creation.where(subjects.c.hidden_for == "")
_planned = (
    sa.select(
        partitions,
        sa.and_(brokers.c.expires_at > now_ms(), brokers.c.writable).label("takes_writes"),
    )
    .join(brokers, brokers.c.broker_group == partitions.c.broker_group)
    .where(
        partitions.c.subject_id == sa.bindparam("of_subject"),
        partitions.c.state == PartitionState.PLANNED,
    )
    .order_by(partitions.c.partition_id)
)


def replan_creation(connection: Connection, subject_id: int) -> bool:
    """
    Move a creation's planned partitions away from brokers that are silent or accept no writes.

    Returns:
        True if the plan has changed. It does not change if all its brokers are available, if no
        other broker is available, or if the subject is open or hidden, because the partitions of a
        hidden subject have the names and parents of its target.
    """
    lock_brokers(connection)
    subject = connection.execute(_not_hidden, {"of_subject": subject_id}).one_or_none()
    if subject is None:
        return False
    rows = connection.execute(_planned, {"of_subject": subject_id}).all()
    unavailable_rows = [row for row in rows if not row.takes_writes]
    hosts = writable_groups(connection)
    if not unavailable_rows or not hosts:
        return False
    _expire_partitions(connection, subject_id, [row.partition_id for row in unavailable_rows])
    host_counts = Counter(row.broker_group for row in rows if row.takes_writes)
    for number, row in enumerate(unavailable_rows, subject.partitions_named):
        host = min(hosts, key=lambda group: (host_counts[group], hosts[group], group))
        host_counts[host] += 1
        connection.execute(
            sa.insert(partitions).values(
                subject_id=subject_id,
                name=partition_name(subject.name, number),
                queue=row.queue,
                range_start=row.range_start,
                range_end=row.range_end,
                broker_group=host,
                state=PartitionState.PLANNED,
            )
        )
    connection.execute(
        sa.update(subjects)
        .where(subjects.c.subject_id == subject_id)
        .values(partitions_named=subject.partitions_named + len(unavailable_rows))
    )
    return True


def fail_creation(
    connection: Connection, subject_id: int, problem: str, *, in_use: Collection[int]
) -> bool:
    """
    Mark a creation as failed. Return False if the subject is already open.

    Args:
        in_use: ids that brokers already use for other partitions; these are left alone.
    """
    if connection.execute(_creation, {"of_subject": subject_id}).one_or_none() is None:
        return False
    rows = connection.execute(_planned, {"of_subject": subject_id}).all()
    ids = [row.partition_id for row in rows]
    connection.execute(
        sa.update(partitions)
        .where(partitions.c.partition_id.in_(ids))
        .values(state=PartitionState.EXPIRED)
    )
    connection.execute(
        sa.update(subjects)
        .where(subjects.c.subject_id == subject_id)
        .values(problem=problem[:PROBLEM_CHARS_MAX])
    )
    hosted_ids = sorted(set(ids).difference(in_use))
    if hosted_ids:
        _expire_partitions(connection, subject_id, hosted_ids)
    return True


def _expire_partitions(connection: Connection, subject_id: int, ids: list[int]) -> None:
    """Mark planned partitions as EXPIRED and journal steps that seal them if brokers host them."""
    connection.execute(
        sa.update(partitions)
        .where(partitions.c.partition_id.in_(ids))
        .values(state=PartitionState.EXPIRED)
    )
    operation_id = connection.execute(
        sa.insert(operations)
        .values(
            subject_id=subject_id,
            kind=OperationKind.CREATE,
            state=OperationState.CANCELED,
            without_source=False,
            problem="",
            driven_until=0,
        )
        .returning(operations.c.operation_id)
    ).scalar_one()
    seal_step = {"operation_id": operation_id, "action": StepAction.SEAL, "done": False}
    rows = [{"partition_id": partition_id, **seal_step} for partition_id in ids]
    connection.execute(sa.insert(steps), rows)
