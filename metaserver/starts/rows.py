"""Rows of new groups that do not begin at the earliest message: planned, and stored by their
brokers. SQL, synchronous.

    no group
        ─▶ group, and a row of `starts` for each partition: one transaction fixes every cursor
        ─▶ its broker has stored the cursor: the row is deleted

Invariants
    The transaction that inserts a group fixes its start on every existing partition; no later
    transaction changes it.
    A partition is not granted while it has a row: see groups/leases.py.
    Children of a resize that are opened later have no row, and begin at their first message.
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
from ..cluster.heard import mark_unsettled
from ..cluster.removals import removals_left
from ..cluster.rows import SubjectRow
from ..cluster.subjects import open_subject_row
from ..groups.group_rows import insert_group, read_stored
from ..groups.leases import raise_token_floor
from ..resets.rows import note_at_end, settable_partitions
from ..sql.dialect import now_ms
from ..sql.schema import brokers, groups, partitions, starts, subjects


@dataclass(frozen=True, slots=True, kw_only=True)
class StartScope:
    """The subject of a group, with the group's id and settings if it exists, else with the
    partitions on which it begins.
    """

    subject: SubjectRow
    group_id: int | None = None
    stored: GroupSettings | None = None
    partitions: tuple[Partition, ...] = ()
    left_out: tuple[Partition, ...] = ()
    """Abandoned partitions on silent brokers."""
    expired: Mapping[int, int | None] = field(default_factory=dict)
    """Id of a partition whose data is gone → its end offset."""


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
    """True if the partition has no message left, so that there is nothing to store."""
    broker_group: str
    address: str | None
    """host:port of the broker; None: it is silent."""


_expired = sa.select(partitions.c.partition_id, partitions.c.end_offset).where(
    partitions.c.subject_id == sa.bindparam("of_subject"),
    partitions.c.state == PartitionState.EXPIRED,
)


def start_scope(connection: Connection, subject: str, group: str) -> StartScope:
    """
    Return the facts that the creation of a group needs.

    Raises:
        InvalidRequestError, SubjectUnknownError
        GroupDeletedError: a group of this name is being deleted.
    """
    check_name("consumer group", group)
    row = open_subject_row(connection, subject)
    named = sa.and_(groups.c.subject_id == row.subject_id, groups.c.name == group)
    chosen = sa.select(groups.c.group_id, groups.c.deleting).where(named)
    known = connection.execute(chosen).one_or_none()
    if known is None:
        selected, left_out = settable_partitions(connection, row.subject_id)
        gone = connection.execute(_expired, {"of_subject": row.subject_id})
        expired = {each.partition_id: each.end_offset for each in gone}
        return StartScope(subject=row, partitions=selected, left_out=left_out, expired=expired)
    if known.deleting:
        raise GroupDeletedError(
            f"consumer group {group!r} is being deleted; it can be made again once its brokers "
            f"have forgotten it",
            subject=subject,
            group=group,
            left=removals_left(connection, row.subject_id, known.group_id),
        )
    return StartScope(
        subject=row,
        group_id=known.group_id,
        stored=read_stored(connection, known.group_id, subject=subject, group=group),
    )


def begin_group(
    connection: Connection,
    scope: StartScope,
    group: str,
    ask: CreateGroup,
    *,
    cursors: Mapping[int, int],
    fence: int = 0,
) -> bool:
    """
    Insert a group, and fix its start.

    Args:
        cursors: partition id → offset of the first message that the group reads; empty: the first
            message of every partition.
        fence: highest token of the group that the brokers have seen.

    Returns:
        False if the partitions have changed or the group was made meanwhile, so that the caller has
        to plan again.

    Raises:
        SubjectUnknownError, OverloadedError, GroupDeletedError
    """
    now = start_scope(connection, scope.subject.name, group)
    ids = {partition.partition_id for partition in scope.partitions}
    moved = cursors and {partition.partition_id for partition in now.partitions} != ids
    if now.stored is not None or now.subject.subject_id != scope.subject.subject_id or moved:
        return False
    insert_group(connection, now.subject, group, strategy=ask.strategy, start=ask.start)
    named = sa.and_(groups.c.subject_id == now.subject.subject_id, groups.c.name == group)
    locked = sa.select(groups.c.group_id, groups.c.last_token, groups.c.version)
    row = connection.execute(locked.where(named).with_for_update()).one()
    if row.version:  # another transaction has made it
        return False
    last = raise_token_floor(row.last_token, fence)
    rows = [
        {
            "group_id": row.group_id,
            "partition_id": partition_id,
            "cursor": cursor,
            "token": last + number,
        }
        for number, (partition_id, cursor) in enumerate(sorted(cursors.items()), 1)
    ]
    if rows:
        connection.execute(sa.insert(starts), rows)
    values = {"last_token": last + len(rows)}
    connection.execute(sa.update(groups).where(groups.c.group_id == row.group_id).values(values))
    mark_unsettled(connection, row.group_id)
    return True


_pending = (
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
    """Return the starts that brokers have to store after (group id, partition id), in that order,
    including those of silent brokers.
    """
    which = {"after_group": after[0], "after_partition": after[1], "most": limit}
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
        for row in connection.execute(_pending, which)
    ]


def pending_of(connection: Connection, group_id: int) -> list[PendingStart]:
    """Return the `pending_starts` of one group."""
    count = sa.select(sa.func.count()).where(starts.c.group_id == group_id)
    limit = connection.execute(count).scalar_one()
    pending = pending_starts(connection, limit=limit, after=(group_id, 0)) if limit else []
    return [start for start in pending if start.group_id == group_id]


def note_started(connection: Connection, group_id: int, done: Sequence[PendingStart]) -> None:
    """
    Store that brokers have stored a group's start, so that it may be granted these partitions.

    Rows that a reset or a deletion has removed meanwhile are skipped.
    """
    tokens = {start.partition_id: start.token for start in done}
    mark_unsettled(connection, group_id)
    here = sa.and_(starts.c.group_id == group_id, starts.c.partition_id.in_(tokens))
    gone = sa.delete(starts).where(here).returning(starts.c.partition_id, starts.c.cursor)
    began = {row.partition_id: row.cursor for row in connection.execute(gone)}
    sealed = sa.select(partitions.c.partition_id, partitions.c.end_offset).where(
        partitions.c.partition_id.in_(began), partitions.c.state == PartitionState.SEALED
    )
    at_end = [
        row.partition_id
        for row in connection.execute(sealed)
        if began[row.partition_id] == row.end_offset
    ]
    note_at_end(connection, group_id, at_end)
