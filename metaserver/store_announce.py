"""Which brokers have not heard of a group yet that will come to their partitions.  SQL, synchronous.

A row of `leases` with token 0 says that the broker knows the group, and that nobody was granted the partition.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from ..protocol.control import Retention
from .dialect import insert_new, now_ms
from .schema import brokers, drained, groups, leases, partitions, subjects
from .store_subjects import SERVED


@dataclass(frozen=True, slots=True, kw_only=True)
class Unheard:
    """A partition, where it is, and the groups its broker has not heard of: (id, name)."""

    partition_id: int
    address: str
    groups: tuple[tuple[int, str], ...]


def unheard_groups(
    connection: Connection, *, limit: int, after: tuple[int, int] = (0, 0)
) -> list[Unheard]:
    """
    Groups that were never granted a partition and are not through with it, where messages wait for every group.

    Args:
        limit: of pairs of a partition and a group.
        after: the pair of ids behind which to go on; pairs come in their order.
    """
    partition_id, group_id = after
    granted = sa.select(sa.literal(1)).where(
        leases.c.group_id == groups.c.group_id,
        leases.c.partition_id == partitions.c.partition_id,
    )
    through = sa.select(sa.literal(1)).where(
        drained.c.group_id == groups.c.group_id,
        drained.c.partition_id == partitions.c.partition_id,
    )
    rows = connection.execute(
        sa.select(partitions.c.partition_id, brokers.c.address, groups.c.group_id, groups.c.name)
        .join(subjects, subjects.c.subject_id == partitions.c.subject_id)
        .join(groups, groups.c.subject_id == subjects.c.subject_id)
        .join(brokers, brokers.c.broker_group == partitions.c.broker_group)
        .where(
            partitions.c.state.in_(SERVED),
            sa.or_(
                partitions.c.partition_id > partition_id,
                sa.and_(partitions.c.partition_id == partition_id, groups.c.group_id > group_id),
            ),
            subjects.c.retention == Retention.ACKED,
            brokers.c.expires_at > now_ms(),
            sa.not_(sa.exists(granted.correlate(groups, partitions))),
            sa.not_(sa.exists(through.correlate(groups, partitions))),
        )
        .order_by(partitions.c.partition_id, groups.c.group_id)
        .limit(limit)
    )
    found: dict[int, Unheard] = {}
    for row in rows:
        before = found.get(row.partition_id)
        found[row.partition_id] = Unheard(
            partition_id=row.partition_id,
            address=row.address,
            groups=(*(before.groups if before else ()), (row.group_id, row.name)),
        )
    return list(found.values())


def note_heard(connection: Connection, heard: Sequence[Unheard]) -> None:
    """The brokers of these partitions know these groups; who was granted one meanwhile keeps his row."""
    ids: Collection[int] = sorted({group_id for one in heard for group_id, _ in one.groups})
    locked = sa.select(groups.c.group_id).where(groups.c.group_id.in_(ids))
    connection.execute(locked.order_by(groups.c.group_id).with_for_update()).all()
    rows = [
        {"group_id": group_id, "partition_id": one.partition_id, "token": 0, "withdrawn": False}
        for one in heard
        for group_id, _ in one.groups
    ]
    insert_new(connection, leases, rows)
