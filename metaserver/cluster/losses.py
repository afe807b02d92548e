"""Partitions whose loss an operator has accepted because their disk is gone. SQL, synchronous.

Invariants
    A lost partition is expired: it is never read and nothing waits for its end. Its parents are
    still read before its children.
    The data folder that had it is refused from then on, so that no message is acked there and never
    read. Its broker group is silent until an empty folder reports itself: a partition planned there
    would prevent that folder from being accepted.
    A folder is refused too if its loss let a partition open whose broker does not know every
    consumer group.
    The unread messages of each group in a lost partition are stored with its loss, as long as the
    group exists.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from ...protocol.control import GivenUpPartition
from ...protocol.operations import GroupLoss, LossView, StepAction
from ...protocol.routing import PartitionState
from ..sql.dialect import insert_new, portions
from ..sql.schema import (
    brokers,
    drained,
    given_up,
    groups,
    lost_folders,
    partitions,
    starts,
    steps,
)


def lose_partitions(connection: Connection, ids: Collection[int]) -> None:
    """Mark partitions as lost, and refuse the data folders that had them."""
    if not ids:
        return
    here = partitions.c.partition_id.in_(ids)
    gone = {"state": PartitionState.EXPIRED, "lost": True, "abandoned": True}
    connection.execute(sa.update(partitions).where(here).values(gone))
    refuse_folders(connection, ids)
    rows = [
        {"group_id": row.group_id, "partition_id": row.partition_id, "messages_max": row.left}
        for row in connection.execute(_unread(ids))
    ]
    insert_new(connection, given_up, rows)
    waits = sa.and_(steps.c.partition_id.in_(ids), steps.c.action == StepAction.SEAL)
    connection.execute(sa.update(steps).where(waits).values(done=True))


def refuse_folders(connection: Connection, ids: Collection[int]) -> None:
    """Refuse the data folders of these partitions from now on."""
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


def _unread(ids: Collection[int]) -> sa.Select[Any]:
    """
    Select the groups, by name, that have not drained these partitions, with the largest number of
    messages that each has not read.

    A group's cursor is known only if its start was not stored at the broker yet: the broker has the
    cursor, and is gone.
    """
    through = sa.select(sa.literal(1)).where(
        drained.c.group_id == groups.c.group_id,
        drained.c.partition_id == partitions.c.partition_id,
    )
    begins = sa.and_(
        starts.c.group_id == groups.c.group_id, starts.c.partition_id == partitions.c.partition_id
    )
    left = partitions.c.end_offset - sa.func.coalesce(starts.c.cursor, 0)
    return (
        sa.select(partitions.c.partition_id, groups.c.group_id, groups.c.name, left.label("left"))
        .join(groups, groups.c.subject_id == partitions.c.subject_id)
        .outerjoin(starts, begins)
        .where(
            partitions.c.partition_id.in_(ids),
            sa.not_(groups.c.deleting),
            sa.not_(sa.exists(through.correlate(groups, partitions))),
        )
        .order_by(groups.c.name)
    )


_given_up = sa.select(
    given_up.c.partition_id, groups.c.name, given_up.c.messages_max.label("left")
).join(groups, groups.c.group_id == given_up.c.group_id)


def read_losses(
    connection: Connection, ids: Collection[int], *, done: bool = False
) -> tuple[LossView, ...]:
    """
    Return the losses that these partitions mean, by id: the end offset, and the groups that have
    not drained them.

    Args:
        done: the partitions are lost already; False: they would be.
    """
    if not ids:
        return ()
    of_groups = _unread(ids)
    if done:
        of_groups = _given_up.where(given_up.c.partition_id.in_(ids)).order_by(groups.c.name)
    unread: dict[int, tuple[GroupLoss, ...]] = defaultdict(tuple)
    for row in connection.execute(of_groups):
        unread[row.partition_id] += (GroupLoss(group=row.name, messages_max=row.left),)
    here = partitions.c.partition_id.in_(ids)
    rows = sa.select(partitions.c.partition_id, partitions.c.end_offset).where(here)
    return tuple(
        LossView(
            partition_id=row.partition_id,
            end_offset=row.end_offset,
            unread_by=tuple(loss.group for loss in unread[row.partition_id]),
            losses=unread[row.partition_id],
        )
        for row in connection.execute(rows.order_by(partitions.c.partition_id))
    )


_of_group = (
    sa.select(given_up, partitions.c.name, partitions.c.broker_group)
    .join(partitions, partitions.c.partition_id == given_up.c.partition_id)
    .where(given_up.c.group_id == sa.bindparam("of_group"))
    .order_by(given_up.c.partition_id)
)


def read_given_up(connection: Connection, group_id: int) -> tuple[GivenUpPartition, ...]:
    """Return the lost partitions that a group had not drained, by id."""
    return tuple(
        GivenUpPartition(
            partition_id=row.partition_id,
            name=row.name,
            broker_group=row.broker_group,
            messages_max=row.messages_max,
        )
        for row in connection.execute(_of_group, {"of_group": group_id})
    )
