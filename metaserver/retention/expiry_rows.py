"""Rows of sealed partitions without messages: read, and marked EXPIRED.  SQL, synchronous.

Invariants
    A partition expires after its parents: else a group that has not read these would read past them.
    A partition that a session holds and has not drained does not expire: its last messages may still be handled.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from ...protocol.ids import Subject
from ...protocol.routing import Partition, PartitionState
from ..cluster.partitions import BY_ID, read_partitions
from ..sql.dialect import now_ms
from ..sql.schema import brokers, drained, groups, leases, partition_parents, partitions, subjects

_parent = partitions.alias("parent")
_kept_parent = (
    sa.select(sa.literal(1))
    .select_from(
        partition_parents.join(_parent, _parent.c.partition_id == partition_parents.c.parent_id)
    )
    .where(
        partition_parents.c.partition_id == partitions.c.partition_id,
        _parent.c.state != PartitionState.EXPIRED,
    )
    .correlate(partitions)
)
_through = sa.select(sa.literal(1)).where(
    drained.c.group_id == leases.c.group_id, drained.c.partition_id == leases.c.partition_id
)
_reader = (
    sa.select(sa.literal(1))
    .select_from(groups.join(leases, leases.c.group_id == groups.c.group_id))
    .where(
        groups.c.subject_id == partitions.c.subject_id,
        leases.c.partition_id == partitions.c.partition_id,
        leases.c.session.is_not(None),
        sa.not_(sa.exists(_through.correlate(leases))),
    )
    .correlate(partitions)
)
_may_expire = sa.and_(
    partitions.c.state == PartitionState.SEALED,
    partitions.c.end_offset.is_not(None),
    sa.not_(sa.exists(_kept_parent)),
    sa.not_(sa.exists(_reader)),
)


_alive = sa.select(brokers.c.broker_group).where(brokers.c.expires_at > now_ms())
_candidates = (
    sa.select(partitions.c.partition_id, partitions.c.end_offset)
    .where(_may_expire, partitions.c.partition_id > sa.bindparam("after"))
    .where(partitions.c.broker_group.in_(_alive))
    .order_by(partitions.c.partition_id)
    .limit(sa.bindparam("most", type_=sa.Integer))
)


def expiry_candidates(
    connection: Connection, *, after: int, limit: int
) -> list[tuple[Partition, int]]:
    """Return partitions on live brokers that may expire, with ids above `after`, and their end offsets; by id."""
    chosen = connection.execute(_candidates, {"after": after, "most": limit})
    ends = {row.partition_id: row.end_offset for row in chosen}
    if not ends:
        return []
    chosen_partitions = read_partitions(connection, BY_ID, ids=list(ends))
    return [(partition, ends[partition.partition_id]) for partition in chosen_partitions]


def mark_expired(connection: Connection, ends: Mapping[int, int]) -> Sequence[Subject]:
    """
    Mark partitions EXPIRED whose brokers have no message of them left, and raise their routes' versions.

    Args:
        ends: partition id → the end offset at which its broker has no message left.

    Returns:
        The subjects whose routes changed.
    """
    of = sa.select(partitions.c.subject_id).where(partitions.c.partition_id.in_(ends))
    here = subjects.c.subject_id.in_(of)
    # Locked in the order in which operations are begun: the subjects by name, then their partitions.
    connection.execute(
        sa.select(subjects.c.subject_id).where(here).order_by(subjects.c.name).with_for_update()
    ).all()
    changed: set[int] = set()
    for partition_id, end_offset in sorted(ends.items()):
        empty = sa.and_(
            partitions.c.partition_id == partition_id,
            partitions.c.end_offset == end_offset,
            _may_expire,
        )
        gone = (
            sa.update(partitions)
            .where(empty)
            .values(state=PartitionState.EXPIRED)
            .returning(partitions.c.subject_id)
        )
        changed |= set(connection.execute(gone).scalars())
    raised = (
        sa.update(subjects)
        .where(subjects.c.subject_id.in_(changed))
        .values(route_version=subjects.c.route_version + 1)
        .returning(subjects.c.name)
    )
    return [Subject(name) for name in connection.execute(raised).scalars()]
