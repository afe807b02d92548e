"""Partitions whose loss an operator has accepted because their disk is gone.  SQL, synchronous.

Invariants
    A lost partition is expired: it is never read and nothing waits for its end.  Its parents are still read before its
    children.
    The data folder that had it is refused from then on, so that no message is acked there and never read.  Its broker
    group is silent until an empty folder reports itself: a partition planned there would keep that folder out.
    A folder is refused too if its loss let a partition open whose broker does not know every consumer group.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from ...protocol.operations import LossView, StepAction
from ...protocol.routing import PartitionState
from ..sql.dialect import insert_new
from ..sql.portions import portions
from ..sql.schema import brokers, drained, groups, lost_folders, partitions, steps


def lose_partitions(connection: Connection, ids: Collection[int]) -> None:
    """Mark partitions as lost and refuse the data folders that had them; does nothing without ids."""
    if not ids:
        return
    here = partitions.c.partition_id.in_(ids)
    gone = {"state": PartitionState.EXPIRED, "lost": True, "abandoned": True}
    connection.execute(sa.update(partitions).where(here).values(gone))
    refuse_folders(connection, ids)
    waits = sa.and_(steps.c.partition_id.in_(ids), steps.c.action == StepAction.SEAL)
    connection.execute(sa.update(steps).where(waits).values(done=True))


def refuse_folders(connection: Connection, ids: Collection[int]) -> None:
    """Refuse the data folders of these partitions from now on; does nothing without ids."""
    for some in portions(ids):
        there = sa.select(partitions.c.broker_group).where(partitions.c.partition_id.in_(some))
        folders = sa.select(brokers.c.broker_id, brokers.c.broker_group).where(
            brokers.c.broker_group.in_(there), brokers.c.broker_id != ""
        )
        rows = [dict(row) for row in connection.execute(folders).mappings()]
        if rows:
            insert_new(connection, lost_folders, rows)
            lost = brokers.c.broker_id.in_(row["broker_id"] for row in rows)
            connection.execute(sa.update(brokers).where(lost).values(expires_at=0))


def read_losses(connection: Connection, ids: Collection[int]) -> tuple[LossView, ...]:
    """Return what is lost with these partitions, by id: end offset, and the groups that have not drained them."""
    if not ids:
        return ()
    here = partitions.c.partition_id.in_(ids)
    through = sa.select(sa.literal(1)).where(
        drained.c.group_id == groups.c.group_id,
        drained.c.partition_id == partitions.c.partition_id,
    )
    behind = (
        sa.select(partitions.c.partition_id, groups.c.name)
        .join(groups, groups.c.subject_id == partitions.c.subject_id)
        .where(here, sa.not_(sa.exists(through.correlate(groups, partitions))))
        .order_by(groups.c.name)
    )
    unread: dict[int, tuple[str, ...]] = defaultdict(tuple)
    for partition_id, name in connection.execute(behind):
        unread[partition_id] += (name,)
    rows = sa.select(partitions.c.partition_id, partitions.c.end_offset).where(here)
    return tuple(
        LossView(
            partition_id=row.partition_id,
            end_offset=row.end_offset,
            unread_by=unread[row.partition_id],
        )
        for row in connection.execute(rows.order_by(partitions.c.partition_id))
    )
