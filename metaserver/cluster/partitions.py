"""Rows of partitions as clients see them, with their parents and their broker's address. SQL,
synchronous.

Invariants
    Partitions are read before their parents: a change between the two reads adds partitions, and no
    parent to a known one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from ...protocol.ids import BrokerGroup, PartitionId, PartitionName, QueueNumber
from ...protocol.routing import Partition, PartitionState
from ..sql.dialect import now_ms
from ..sql.schema import brokers, leases, partition_parents, partitions, subjects

HAS_PARENTS = sa.exists().where(partition_parents.c.partition_id == partitions.c.partition_id)
"""True if a partition continues others, including those that clients do not know."""
_seen = sa.select(
    partitions,
    sa.case((brokers.c.expires_at > now_ms(), brokers.c.address)).label("address"),
).join_from(partitions, brokers)
_with_parents = (
    sa.select(partition_parents.c.partition_id, partition_parents.c.parent_id)
    .join(partitions, partitions.c.partition_id == partition_parents.c.partition_id)
    .order_by(partition_parents.c.parent_id)
)


_parent = partitions.alias("parent")
_parent_subject = subjects.alias("parent_subject")
SEEN_PARENT = sa.exists().where(
    _parent.c.partition_id == partition_parents.c.parent_id,
    _parent.c.state != PartitionState.PLANNED,
    _parent_subject.c.subject_id == _parent.c.subject_id,
    _parent_subject.c.hidden_for == "",
)
"""True if a row of `partition_parents` names a parent that clients know: not a planned one, nor one
of a hidden subject.
"""


class PartitionFilter:
    """
    A condition on partitions, which may have bind parameters. Create it once, because it holds
    prepared statements.

    Args:
        hosted: read every parent, as brokers host them; False: only those that clients know.
    """

    def __init__(self, condition: sa.ColumnElement[bool], *, hosted: bool = False) -> None:
        self.partitions = _seen.where(condition).order_by(partitions.c.partition_id)
        parents = _with_parents.where(condition)
        self.parents = parents if hosted else parents.where(SEEN_PARENT)


BY_ID = PartitionFilter(partitions.c.partition_id.in_(sa.bindparam("ids")))
HOSTED_BY_ID = PartitionFilter(partitions.c.partition_id.in_(sa.bindparam("ids")), hosted=True)


def read_partitions(
    connection: Connection, choice: PartitionFilter, **values: Any
) -> tuple[Partition, ...]:
    """Return the partitions that meet a condition, by id; `values` are its bind parameters."""
    rows = connection.execute(choice.partitions, values).all()
    return _complete(rows, _read_parents(connection, choice.parents, values))


_of_subject = partitions.c.subject_id == sa.bindparam("of_subject")
_subject_partitions = _seen.where(
    _of_subject, partitions.c.state.in_(sa.bindparam("states"))
).order_by(partitions.c.range_start, partitions.c.partition_id)
_subject_parents = _with_parents.where(_of_subject, SEEN_PARENT)
# A subject keeps the rows of expired partitions, which become many times as many as the others.
_kept_parents = _subject_parents.where(partitions.c.state != PartitionState.EXPIRED)


def is_gone(table: sa.FromClause) -> sa.ColumnElement[bool]:
    """Return the condition that a row of `partitions`, or of an alias of it, was EXPIRED by
    retention, so that it blocks no child of any group.
    """
    return sa.and_(table.c.state == PartitionState.EXPIRED, sa.not_(table.c.lost))


_blocking_parents = _with_parents.where(
    _of_subject,
    sa.not_(is_gone(partitions)),
    SEEN_PARENT,
    sa.exists().where(
        _parent.c.partition_id == partition_parents.c.parent_id, sa.not_(is_gone(_parent))
    ),
)


def subject_partitions(
    connection: Connection, subject_id: int, states: Sequence[PartitionState]
) -> tuple[Partition, ...]:
    """Return a subject's partitions in these states, none of which may be EXPIRED, by range and
    then by id.
    """
    assert PartitionState.EXPIRED not in states
    here = {"of_subject": subject_id, "states": states}
    rows = connection.execute(_subject_partitions, here).all()
    # A partition that expires between the two statements has no parent left: parents expire first.
    return _complete(rows, _read_parents(connection, _kept_parents, here))


def blocking_parents(
    connection: Connection, subject_id: int
) -> dict[PartitionId, tuple[PartitionId, ...]]:
    """Return `subject_parents` without partitions and parents that are gone."""
    return _read_parents(connection, _blocking_parents, {"of_subject": subject_id})


def subject_parents(
    connection: Connection, subject_id: int
) -> dict[PartitionId, tuple[PartitionId, ...]]:
    """Return partition id → its parents that clients know, for those partitions of a subject that
    have parents.
    """
    return _read_parents(connection, _subject_parents, {"of_subject": subject_id})


def select_granted(condition: sa.ColumnElement[bool]) -> sa.Select[Any]:
    """Make the statement for `granted_partitions`, for the partitions whose leases meet a
    condition.
    """
    return (
        _seen.add_columns(leases.c.token, leases.c.session, HAS_PARENTS.label("has_parents"))
        .join(leases, leases.c.partition_id == partitions.c.partition_id)
        .where(condition)
        .order_by(partitions.c.partition_id)
    )


def granted_partitions(
    connection: Connection, granted: sa.Select[Any], **values: Any
) -> list[tuple[Partition, int, str | None]]:
    """
    Return the partitions that `granted` selects, by id, with the tokens and sessions of their
    leases.

    `values` are bind parameters.
    """
    rows = connection.execute(granted, values).all()
    ids = [row.partition_id for row in rows if row.has_parents]
    known = _read_parents(connection, BY_ID.parents, {"ids": ids}) if ids else {}
    complete = _complete(rows, known)
    return [
        (partition, row.token, row.session) for partition, row in zip(complete, rows, strict=True)
    ]


def _read_parents(
    connection: Connection, statement: sa.Select[Any], values: Mapping[str, Any]
) -> dict[PartitionId, tuple[PartitionId, ...]]:
    parents: dict[PartitionId, tuple[PartitionId, ...]] = {}
    for child, parent in connection.execute(statement, values):
        parents[child] = (*parents.get(child, ()), parent)
    return parents


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
