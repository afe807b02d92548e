"""Stores the rows of new groups that do not start at the earliest message. Runs SQL synchronously.

    no group
        ─▶ group, and a row of `starts` for each partition: one transaction fixes every cursor
        ─▶ its broker has stored the cursor: the row is deleted

Invariants
    The transaction that inserts a group fixes its start on every existing partition; no later
    transaction changes it.
    A partition is not granted while it has a row; see `groups/leases.py`.
    Children of a resize that are opened later have no row, and are read from their first message.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from ...protocol.errors import GroupDeletedError
from ...protocol.groups import CreateGroup, GroupSettings
from ...protocol.ids import check_name
from ...protocol.routing import ConsumeStrategy, Partition, PartitionState
from ..cluster.announcements import mark_unsettled
from ..cluster.removals import count_removals
from ..cluster.rows import SubjectRow
from ..cluster.subjects import open_subject_row
from ..groups.group_rows import insert_group, read_stored
from ..groups.leases import raise_token_floor
from ..resets.rows import record_drained, settable_partitions
from ..sql.dialect import now_ms
from ..sql.schema import brokers, groups, partitions, starts, subjects


@dataclass(frozen=True, slots=True, kw_only=True)
class StartScope:
    """A group's subject. If the group exists, also its id and settings; otherwise, the partitions
    on which it will start.
    """

    subject: SubjectRow
    group_id: int | None = None
    settings: GroupSettings | None = None
    partitions: tuple[Partition, ...] = ()
    left_out: tuple[Partition, ...] = ()
    """Abandoned partitions on silent brokers."""
    expired_ends: Mapping[int, int | None] = field(default_factory=dict)
    """Maps the id of each partition whose data is gone to its end offset."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingStart:
    """The start of a group on a partition whose broker has not stored it yet."""

    group_id: int
    subject: str
    group: str
    strategy: ConsumeStrategy
    partition_id: int
    cursor: int
    token: int
    expired: bool
    """True if the partition has expired, so that there is nothing to store."""
    broker_group: str
    address: str | None
    """The `host:port` of the broker; None if it is silent."""


_expired_query = sa.select(partitions.c.partition_id, partitions.c.end_offset).where(
    partitions.c.subject_id == sa.bindparam("of_subject"),
    partitions.c.state == PartitionState.EXPIRED,
)


def read_start_scope(connection: Connection, subject: str, group: str) -> StartScope:
    """
    Return the rows needed to create a group.

    Raises:
        InvalidRequestError, SubjectUnknownError
        GroupDeletedError: a group of this name is being deleted.
    """
    check_name("consumer group", group)
    row = open_subject_row(connection, subject)
    is_this_group = sa.and_(groups.c.subject_id == row.subject_id, groups.c.name == group)
    query = sa.select(groups.c.group_id, groups.c.deleting).where(is_this_group)
    group_row = connection.execute(query).one_or_none()
    if group_row is None:
        selected_partitions, skipped_partitions = settable_partitions(connection, row.subject_id)
        expired_rows = connection.execute(_expired_query, {"of_subject": row.subject_id})
        expired_ends = {each.partition_id: each.end_offset for each in expired_rows}
        return StartScope(
            subject=row,
            partitions=selected_partitions,
            left_out=skipped_partitions,
            expired_ends=expired_ends,
        )
    if group_row.deleting:
        raise GroupDeletedError(
            f"consumer group {group!r} is being deleted; it can be created again once its brokers "
            f"have forgotten it",
            subject=subject,
            group=group,
            left=count_removals(connection, row.subject_id, group_row.group_id),
        )
    return StartScope(
        subject=row,
        group_id=group_row.group_id,
        settings=read_stored(connection, group_row.group_id, subject=subject, group=group),
    )


def begin_group(
    connection: Connection,
    scope: StartScope,
    group: str,
    request: CreateGroup,
    *,
    cursors: Mapping[int, int],
    fence: int = 0,
) -> bool:
    """
    Insert a group and fix its start.

    Args:
        cursors: maps each partition id to the offset of the first message that the group reads; if
            empty, every partition is read from its first message.
        fence: highest token of the group that the brokers have seen.

    Returns:
        False if the partitions have changed or the group has been created in the meantime, so that
        the caller must plan again.

    Raises:
        SubjectUnknownError, OverloadedError, GroupDeletedError
    """
    current_scope = read_start_scope(connection, scope.subject.name, group)
    ids = {partition.partition_id for partition in scope.partitions}
    has_changed = (
        cursors and {partition.partition_id for partition in current_scope.partitions} != ids
    )
    is_replaced = current_scope.subject.subject_id != scope.subject.subject_id
    if current_scope.settings is not None or is_replaced or has_changed:
        return False
    insert_group(
        connection, current_scope.subject, group, strategy=request.strategy, start=request.start
    )
    is_this_group = sa.and_(
        groups.c.subject_id == current_scope.subject.subject_id, groups.c.name == group
    )
    query = sa.select(groups.c.group_id, groups.c.last_token, groups.c.version)
    row = connection.execute(query.where(is_this_group).with_for_update()).one()
    if row.version:  # another transaction has created it
        return False
    last_token = raise_token_floor(row.last_token, fence)
    rows = [
        {
            "group_id": row.group_id,
            "partition_id": partition_id,
            "cursor": cursor,
            "token": last_token + number,
        }
        for number, (partition_id, cursor) in enumerate(sorted(cursors.items()), 1)
    ]
    if rows:
        connection.execute(sa.insert(starts), rows)
    values = {"last_token": last_token + len(rows)}
    connection.execute(sa.update(groups).where(groups.c.group_id == row.group_id).values(values))
    mark_unsettled(connection, row.group_id)
    return True


_pending_query = (
    sa.select(
        starts,
        subjects.c.name.label("subject"),
        groups.c.name,
        groups.c.strategy,
        partitions.c.broker_group,
        (partitions.c.state == PartitionState.EXPIRED).label("expired"),
        sa.case((brokers.c.expires_at > now_ms(), brokers.c.address)).label("address"),
    )
    .join(groups, groups.c.group_id == starts.c.group_id)
    .join(subjects, subjects.c.subject_id == groups.c.subject_id)
    .join(partitions, partitions.c.partition_id == starts.c.partition_id)
    .join(brokers, brokers.c.broker_group == partitions.c.broker_group)
    .where(
        sa.not_(sa.or_(groups.c.deleting, subjects.c.deleting)),
        sa.tuple_(starts.c.group_id, starts.c.partition_id)
        > sa.tuple_(sa.bindparam("after_group"), sa.bindparam("after_partition")),
    )
    .order_by(starts.c.group_id, starts.c.partition_id)
    .limit(sa.bindparam("most"))
)


def pending_starts(
    connection: Connection, *, limit: int, after: tuple[int, int] = (0, 0)
) -> list[PendingStart]:
    """Return the next starts that brokers, including silent ones, still have to store, ordered by
    (group id, partition id) and starting above `after`.
    """
    parameters = {"after_group": after[0], "after_partition": after[1], "most": limit}
    return [
        PendingStart(
            group_id=row.group_id,
            subject=row.subject,
            group=row.name,
            strategy=ConsumeStrategy(row.strategy),
            partition_id=row.partition_id,
            cursor=row.cursor,
            token=row.token,
            expired=row.expired,
            broker_group=row.broker_group,
            address=row.address,
        )
        for row in connection.execute(_pending_query, parameters)
    ]


def read_pending_starts(connection: Connection, group_id: int) -> list[PendingStart]:
    """Return the pending starts of one group."""
    count = sa.select(sa.func.count()).where(starts.c.group_id == group_id)
    limit = connection.execute(count).scalar_one()
    pending = pending_starts(connection, limit=limit, after=(group_id, 0)) if limit else []
    return [start for start in pending if start.group_id == group_id]


def complete_starts(
    connection: Connection, group_id: int, stored_starts: Sequence[PendingStart]
) -> None:
    """
    Record that brokers have stored a group's starts, so that the group may be granted these
    partitions.

    Starts whose rows have since been removed by a reset or a deletion are skipped.
    """
    tokens = {start.partition_id: start.token for start in stored_starts}
    mark_unsettled(connection, group_id)
    is_stored = sa.and_(starts.c.group_id == group_id, starts.c.partition_id.in_(tokens))
    delete_rows = sa.delete(starts).where(is_stored)
    deleted_rows = connection.execute(delete_rows.returning(starts.c.partition_id, starts.c.cursor))
    cursors = {row.partition_id: row.cursor for row in deleted_rows}
    sealed_query = sa.select(partitions.c.partition_id, partitions.c.end_offset).where(
        partitions.c.partition_id.in_(cursors), partitions.c.state == PartitionState.SEALED
    )
    at_end_ids = [
        row.partition_id
        for row in connection.execute(sealed_query)
        if cursors[row.partition_id] == row.end_offset
    ]
    record_drained(connection, group_id, at_end_ids)
