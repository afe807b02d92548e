"""Reads partitions as clients see them, with their parents and their broker's address. Runs SQL
synchronously.

Invariants
    Partitions are read before their parents: a change between the two reads may add partitions, but
    no parents to those already read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from ...protocol.control import LeaseEnd, PreviousOwner
from ...protocol.ids import BrokerGroup, PartitionId, PartitionName, QueueNumber
from ...protocol.routing import Partition, PartitionState
from ..sql.dialect import calendar_ms, now_ms
from ..sql.schema import brokers, leases, partition_parents, partitions, subjects

HAS_PARENTS = sa.exists().where(partition_parents.c.partition_id == partitions.c.partition_id)
"""True for a partition that has parents, including those that clients cannot see."""
_partitions_query = sa.select(
    partitions,
    sa.case((brokers.c.expires_at > now_ms(), brokers.c.address)).label("address"),
).join_from(partitions, brokers)
_parents_query = (
    sa.select(partition_parents.c.partition_id, partition_parents.c.parent_id)
    .join(partitions, partitions.c.partition_id == partition_parents.c.partition_id)
    .order_by(partition_parents.c.parent_id)
)


_parent = partitions.alias("parent")
_parent_subject = subjects.alias("parent_subject")
IS_VISIBLE_PARENT = sa.exists().where(
    _parent.c.partition_id == partition_parents.c.parent_id,
    _parent.c.state != PartitionState.PLANNED,
    _parent_subject.c.subject_id == _parent.c.subject_id,
    _parent_subject.c.hidden_for == "",
)
"""True if the parent in a row of `partition_parents` is visible to clients, that is, neither
planned nor part of a hidden subject.
"""


class PartitionFilter:
    """
    The statements that read the partitions matching a condition.

    Create each filter only once, so that SQLAlchemy can cache its statements. The condition may
    have bind parameters.

    Args:
        hosted: include all parents, as brokers know them, instead of only those that clients can
            see.
    """

    def __init__(self, condition: sa.ColumnElement[bool], *, hosted: bool = False) -> None:
        self.partitions = _partitions_query.where(condition).order_by(partitions.c.partition_id)
        parents = _parents_query.where(condition)
        self.parents = parents if hosted else parents.where(IS_VISIBLE_PARENT)


BY_ID = PartitionFilter(partitions.c.partition_id.in_(sa.bindparam("ids")))
HOSTED_BY_ID = PartitionFilter(partitions.c.partition_id.in_(sa.bindparam("ids")), hosted=True)


def read_partitions(
    connection: Connection, partition_filter: PartitionFilter, **values: Any
) -> tuple[Partition, ...]:
    """Return the partitions that a filter selects, ordered by id. `values` are its bind
    parameters.
    """
    rows = connection.execute(partition_filter.partitions, values).all()
    return _build_partitions(rows, _read_parents(connection, partition_filter.parents, values))


_is_in_subject = partitions.c.subject_id == sa.bindparam("of_subject")
_subject_partitions_query = _partitions_query.where(
    _is_in_subject, partitions.c.state.in_(sa.bindparam("states"))
).order_by(partitions.c.range_start, partitions.c.partition_id)
_subject_parents_query = _parents_query.where(_is_in_subject, IS_VISIBLE_PARENT)
# Rows of expired partitions are kept and eventually far outnumber the others.
_unexpired_parents_query = _subject_parents_query.where(
    partitions.c.state != PartitionState.EXPIRED
)


def is_expired_by_retention(table: sa.FromClause) -> sa.ColumnElement[bool]:
    """Return the condition that a row of `partitions`, or of an alias, was marked EXPIRED by
    retention. Such a partition does not block its children.
    """
    return sa.and_(table.c.state == PartitionState.EXPIRED, sa.not_(table.c.lost))


_blocking_parents_query = _parents_query.where(
    _is_in_subject,
    sa.not_(is_expired_by_retention(partitions)),
    IS_VISIBLE_PARENT,
    sa.exists().where(
        _parent.c.partition_id == partition_parents.c.parent_id,
        sa.not_(is_expired_by_retention(_parent)),
    ),
)


def subject_partitions(
    connection: Connection, subject_id: int, states: Sequence[PartitionState]
) -> tuple[Partition, ...]:
    """Return a subject's partitions in these states, ordered by range and id. `states` must not
    include EXPIRED.
    """
    assert PartitionState.EXPIRED not in states
    parameters = {"of_subject": subject_id, "states": states}
    rows = connection.execute(_subject_partitions_query, parameters).all()
    # A partition that expires between the two statements has no parents: they expire first.
    return _build_partitions(rows, _read_parents(connection, _unexpired_parents_query, parameters))


_ages_query = sa.select(
    partitions.c.partition_id, (calendar_ms() - partitions.c.opened_at).label("age_ms")
).where(partitions.c.subject_id == sa.bindparam("of_subject"), partitions.c.opened_at.is_not(None))


def read_ages_ms(connection: Connection, subject_id: int) -> dict[PartitionId, int]:
    """Return a dict that maps each partition of a subject to the time since it was opened, in
    milliseconds, as far as that is known.
    """
    rows = connection.execute(_ages_query, {"of_subject": subject_id})
    return {row.partition_id: max(0, row.age_ms) for row in rows}


def blocking_parents(
    connection: Connection, subject_id: int
) -> dict[PartitionId, tuple[PartitionId, ...]]:
    """Return `subject_parents`, excluding the partitions and parents that have been expired by
    retention.
    """
    return _read_parents(connection, _blocking_parents_query, {"of_subject": subject_id})


def subject_parents(
    connection: Connection, subject_id: int
) -> dict[PartitionId, tuple[PartitionId, ...]]:
    """Return a dict that maps each partition of a subject that has parents visible to clients to
    those parents.
    """
    return _read_parents(connection, _subject_parents_query, {"of_subject": subject_id})


def select_granted(condition: sa.ColumnElement[bool]) -> sa.Select[Any]:
    """Build the query for `granted_partitions`, which selects the partitions whose leases match a
    condition.
    """
    return (
        _partitions_query.add_columns(
            leases.c.token,
            leases.c.session,
            leases.c.previous_client,
            leases.c.previous_end,
            HAS_PARENTS.label("has_parents"),
        )
        .join(leases, leases.c.partition_id == partitions.c.partition_id)
        .where(condition)
        .order_by(partitions.c.partition_id)
    )


def granted_partitions(
    connection: Connection, query: sa.Select[Any], **values: Any
) -> list[tuple[Partition, int, str | None, PreviousOwner | None]]:
    """
    Return the partitions found by a query built with `select_granted`, ordered by id, each with the
    token, session and previous owner of its lease.

    `values` are bind parameters.
    """
    rows = connection.execute(query, values).all()
    ids = [row.partition_id for row in rows if row.has_parents]
    parents = _read_parents(connection, BY_ID.parents, {"ids": ids}) if ids else {}
    granted = _build_partitions(rows, parents)
    return [
        (partition, row.token, row.session, build_previous(row))
        for partition, row in zip(granted, rows, strict=True)
    ]


def build_previous(row: sa.Row[Any]) -> PreviousOwner | None:
    """Return the previous owner in a row with the columns of a lease; None if it is unknown."""
    if not row.previous_client:
        return None
    return PreviousOwner(client=row.previous_client, end=LeaseEnd(row.previous_end))


def _read_parents(
    connection: Connection, statement: sa.Select[Any], values: Mapping[str, Any]
) -> dict[PartitionId, tuple[PartitionId, ...]]:
    parents: dict[PartitionId, tuple[PartitionId, ...]] = {}
    for child, parent in connection.execute(statement, values):
        parents[child] = (*parents.get(child, ()), parent)
    return parents


def _build_partitions(
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
