"""Rows of partitions as clients see them, with parents and the address of their broker.  SQL, synchronous.

Invariants
    Partitions are read before their parents: what comes between two statements adds partitions, never parents to one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from ...protocol.ids import BrokerGroup, PartitionId, PartitionName, QueueNumber
from ...protocol.routing import Partition, PartitionState
from ..sql.dialect import now_ms
from ..sql.schema import brokers, leases, partition_parents, partitions

_seen = sa.select(
    partitions,
    sa.case((brokers.c.expires_at > now_ms(), brokers.c.address)).label("address"),
).join_from(partitions, brokers)
_with_parents = (
    sa.select(partition_parents.c.partition_id, partition_parents.c.parent_id)
    .join(partitions, partitions.c.partition_id == partition_parents.c.partition_id)
    .order_by(partition_parents.c.parent_id)
)


class PartitionFilter:
    """Which partitions to read: a condition, perhaps with parameters.  Its statements are made once: keep it."""

    def __init__(self, condition: sa.ColumnElement[bool]) -> None:
        self.partitions = _seen.where(condition).order_by(partitions.c.partition_id)
        self.parents = _with_parents.where(condition)


BY_ID = PartitionFilter(partitions.c.partition_id.in_(sa.bindparam("ids")))


def read_partitions(
    connection: Connection, choice: PartitionFilter, **values: Any
) -> tuple[Partition, ...]:
    """The chosen partitions, by age; `values` are those of the condition's parameters."""
    rows = connection.execute(choice.partitions, values).all()
    return _complete(rows, _read_parents(connection, choice.parents, values))


_of_subject = partitions.c.subject_id == sa.bindparam("of_subject")
_subject_partitions = _seen.where(
    _of_subject, partitions.c.state.in_(sa.bindparam("states"))
).order_by(partitions.c.range_start, partitions.c.partition_id)
_subject_parents = _with_parents.where(_of_subject)


def subject_partitions(
    connection: Connection, subject_id: int, states: Sequence[PartitionState]
) -> tuple[Partition, ...]:
    """A subject's partitions in these states, by range and then by age."""
    here = {"of_subject": subject_id, "states": states}
    rows = connection.execute(_subject_partitions, here).all()
    return _complete(rows, subject_parents(connection, subject_id))


def subject_parents(
    connection: Connection, subject_id: int
) -> dict[PartitionId, tuple[PartitionId, ...]]:
    """The parents of a subject's partitions; those without any are left out."""
    return _read_parents(connection, _subject_parents, {"of_subject": subject_id})


def select_granted(condition: sa.ColumnElement[bool]) -> sa.Select[Any]:
    """The statement for `granted_partitions`: those whose leases meet a condition."""
    return (
        _seen.add_columns(leases.c.token)
        .join(leases, leases.c.partition_id == partitions.c.partition_id)
        .where(condition)
        .order_by(partitions.c.partition_id)
    )


def granted_partitions(
    connection: Connection, granted: sa.Select[Any], **values: Any
) -> list[tuple[Partition, int]]:
    """The partitions that `granted` selects with these parameters, with their tokens, by id."""
    rows = connection.execute(granted, values).all()
    ids = [row.partition_id for row in rows]
    known = _read_parents(connection, BY_ID.parents, {"ids": ids}) if ids else {}
    found = _complete(rows, known)
    return [(one, row.token) for one, row in zip(found, rows, strict=True)]


def _read_parents(
    connection: Connection, statement: sa.Select[Any], values: Mapping[str, Any]
) -> dict[PartitionId, tuple[PartitionId, ...]]:
    found: dict[PartitionId, tuple[PartitionId, ...]] = {}
    for child, parent in connection.execute(statement, values):
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
