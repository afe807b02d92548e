"""Rows of partitions as clients see them, with parents and the address of their broker.  SQL, synchronous."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from ..protocol.ids import BrokerGroup, PartitionId, PartitionName, QueueNumber
from ..protocol.routing import Partition, PartitionState
from .dialect import now_ms
from .schema import brokers, leases, partition_parents, partitions

_seen = sa.select(
    partitions,
    sa.case((brokers.c.expires_at > now_ms(), brokers.c.address)).label("address"),
).join_from(partitions, brokers)


def subject_partitions(
    connection: Connection, subject_id: int, states: Sequence[PartitionState]
) -> tuple[Partition, ...]:
    """A subject's partitions in these states, by range and then by age."""
    rows = connection.execute(
        _seen.where(partitions.c.subject_id == subject_id, partitions.c.state.in_(states)).order_by(
            partitions.c.range_start, partitions.c.partition_id
        )
    ).all()
    of_subject = partitions.c.subject_id == subject_id
    return _complete(rows, subject_parents(connection, of_subject))


def some_partitions(
    connection: Connection, condition: sa.ColumnElement[bool]
) -> tuple[Partition, ...]:
    """The partitions that meet a condition, by age."""
    rows = connection.execute(_seen.where(condition).order_by(partitions.c.partition_id)).all()
    return _complete(rows, subject_parents(connection, condition))


def granted_partitions(
    connection: Connection, held: sa.ColumnElement[bool]
) -> list[tuple[Partition, int]]:
    """The partitions whose leases meet a condition, with their tokens, by id."""
    rows = connection.execute(
        _seen.add_columns(leases.c.token)
        .join(leases, leases.c.partition_id == partitions.c.partition_id)
        .where(held)
        .order_by(partitions.c.partition_id)
    ).all()
    ids = [row.partition_id for row in rows]
    known = subject_parents(connection, partitions.c.partition_id.in_(ids)) if ids else {}
    found = _complete(rows, known)
    return [(one, row.token) for one, row in zip(found, rows, strict=True)]


def subject_parents(
    connection: Connection, condition: sa.ColumnElement[bool]
) -> dict[PartitionId, tuple[PartitionId, ...]]:
    """The parents of the partitions that meet a condition; those without any are left out."""
    rows = connection.execute(
        sa.select(partition_parents.c.partition_id, partition_parents.c.parent_id)
        .join(partitions, partitions.c.partition_id == partition_parents.c.partition_id)
        .where(condition)
        .order_by(partition_parents.c.parent_id)
    )
    found: dict[PartitionId, tuple[PartitionId, ...]] = {}
    for child, parent in rows:
        found[child] = (*found.get(child, ()), parent)
    return found


def _complete(
    rows: Sequence[sa.Row[Any]],
    parents: dict[PartitionId, tuple[PartitionId, ...]],
) -> tuple[Partition, ...]:
    return tuple(
        Partition(
            partition_id=PartitionId(row.partition_id),
            name=PartitionName(row.name),
            queue=QueueNumber(row.queue),
            range_start=row.range_start,
            range_end=row.range_end,
            broker_group=BrokerGroup(row.broker_group),
            state=PartitionState(row.state),
            parents=parents.get(row.partition_id, ()),
            address=row.address,
            logic_start=row.logic_start,
        )
        for row in rows
    )
