"""Marks partitions as lost, once an operator has accepted that their disk is gone. Runs SQL
synchronously.

Invariants
    A lost partition is expired: it is never read, and nothing waits for its end. Its parents are
    still read before its children.
    The data folder that contained the partition is refused from then on, because messages acked
    there would never be read. Its broker group counts as silent until a broker with an empty folder
    sends a report. Otherwise a new partition could be planned on the group, and the empty folder
    would be refused.
    A data folder is also refused if its loss caused a partition to be opened whose broker does not
    know every consumer group.
    The number of messages in a lost partition that a group has not read is stored as long as the
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
from ..sql.dialect import insert_new, split_ids
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


def mark_lost(connection: Connection, ids: Collection[int]) -> None:
    """Mark partitions as lost and refuse the data folders that contained them."""
    if not ids:
        return
    is_lost = partitions.c.partition_id.in_(ids)
    lost_state = {"state": PartitionState.EXPIRED, "lost": True, "abandoned": True}
    connection.execute(sa.update(partitions).where(is_lost).values(lost_state))
    refuse_folders(connection, ids)
    unread_rows = [
        {"group_id": row.group_id, "partition_id": row.partition_id, "messages_max": row.unread}
        for row in connection.execute(_build_unread_query(ids))
    ]
    insert_new(connection, given_up, unread_rows)
    seal_steps = sa.and_(steps.c.partition_id.in_(ids), steps.c.action == StepAction.SEAL)
    connection.execute(sa.update(steps).where(seal_steps).values(done=True))


def refuse_folders(connection: Connection, ids: Collection[int]) -> None:
    """Permanently refuse the data folders of these partitions."""
    for chunk in split_ids(ids):
        broker_groups = sa.select(partitions.c.broker_group).where(
            partitions.c.partition_id.in_(chunk)
        )
        folders = sa.select(brokers.c.broker_id, brokers.c.broker_group).where(
            brokers.c.broker_group.in_(broker_groups), brokers.c.broker_id != ""
        )
        rows = [dict(row) for row in connection.execute(folders).mappings()]
        if rows:
            insert_new(connection, lost_folders, rows)
            is_refused = brokers.c.broker_id.in_(row["broker_id"] for row in rows)
            connection.execute(sa.update(brokers).where(is_refused).values(expires_at=0))


def _build_unread_query(ids: Collection[int]) -> sa.Select[Any]:
    """
    Build a query for the groups that have not drained these partitions, each with the maximum
    number of messages that it has not read.

    The exact number is unknown because only the lost broker had the group's cursor, except if the
    group's start had not been stored there yet.
    """
    is_drained = sa.select(sa.literal(1)).where(
        drained.c.group_id == groups.c.group_id,
        drained.c.partition_id == partitions.c.partition_id,
    )
    has_start = sa.and_(
        starts.c.group_id == groups.c.group_id, starts.c.partition_id == partitions.c.partition_id
    )
    unread_count = partitions.c.end_offset - sa.func.coalesce(starts.c.cursor, 0)
    return (
        sa.select(
            partitions.c.partition_id,
            groups.c.group_id,
            groups.c.name,
            unread_count.label("unread"),
        )
        .join(groups, groups.c.subject_id == partitions.c.subject_id)
        .outerjoin(starts, has_start)
        .where(
            partitions.c.partition_id.in_(ids),
            sa.not_(groups.c.deleting),
            sa.not_(sa.exists(is_drained.correlate(groups, partitions))),
        )
        .order_by(groups.c.name)
    )


_given_up_query = sa.select(
    given_up.c.partition_id, groups.c.name, given_up.c.messages_max.label("unread")
).join(groups, groups.c.group_id == given_up.c.group_id)


def read_losses(
    connection: Connection, ids: Collection[int], *, is_done: bool = False
) -> tuple[LossView, ...]:
    """
    Return the loss of each of these partitions, ordered by id: its end offset, and the groups that
    have not drained it.

    Args:
        is_done: whether the partitions are already lost; if not, the result is a preview.
    """
    if not ids:
        return ()
    query = _build_unread_query(ids)
    if is_done:
        query = _given_up_query.where(given_up.c.partition_id.in_(ids)).order_by(groups.c.name)
    losses_by_partition: dict[int, tuple[GroupLoss, ...]] = defaultdict(tuple)
    for row in connection.execute(query):
        losses_by_partition[row.partition_id] += (
            GroupLoss(group=row.name, messages_max=row.unread),
        )
    is_selected = partitions.c.partition_id.in_(ids)
    rows = sa.select(partitions.c.partition_id, partitions.c.end_offset).where(is_selected)
    return tuple(
        LossView(
            partition_id=row.partition_id,
            end_offset=row.end_offset,
            unread_by=tuple(loss.group for loss in losses_by_partition[row.partition_id]),
            losses=losses_by_partition[row.partition_id],
        )
        for row in connection.execute(rows.order_by(partitions.c.partition_id))
    )


_given_up_of_group_query = (
    sa.select(given_up, partitions.c.name, partitions.c.broker_group)
    .join(partitions, partitions.c.partition_id == given_up.c.partition_id)
    .where(given_up.c.group_id == sa.bindparam("of_group"))
    .order_by(given_up.c.partition_id)
)


def read_given_up(connection: Connection, group_id: int) -> tuple[GivenUpPartition, ...]:
    """Return the lost partitions that a group had not drained when they were lost, ordered by
    id.
    """
    return tuple(
        GivenUpPartition(
            partition_id=row.partition_id,
            name=row.name,
            broker_group=row.broker_group,
            messages_max=row.messages_max,
        )
        for row in connection.execute(_given_up_of_group_query, {"of_group": group_id})
    )
