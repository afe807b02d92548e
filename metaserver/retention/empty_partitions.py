"""Removes sealed partitions from routes after retention has removed the last of their messages.

    SEALED ─▶ EXPIRED ─▶ rows of `drained`, `heard` and free `leases` are deleted; the partition,
                         its lineage and its end stay

Invariants
    A partition expires only after its parents. Otherwise a group that has not read the parents
    would skip them.
    A partition that is held by a session and not drained does not expire, because its last messages
    may still be in the process of being handled.
    A lost partition keeps its rows, because groups may not have read its ancestors.

    SEALED, its parents EXPIRED ─▶ its broker: first offset = end? ─▶ EXPIRED, route + 1
                                                                   ─▶ its children may be next

Each run takes a lease, so that two metaservers do not repeat each other's work.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from ...protocol import endpoints
from ...protocol.errors import KeylaneError
from ...protocol.ids import Subject
from ...protocol.routing import Partition, PartitionState
from ...rpc.client import BrokerClient
from ...rpc.network import Network
from ..catalogue.service import Catalogue
from ..cluster.announcements import lock_groups
from ..cluster.partitions import BY_ID, is_expired_by_retention, read_partitions
from ..settings import MetaserverSettings
from ..sql.database import Database
from ..sql.dialect import now_ms
from ..sql.duties import take_duty
from ..sql.schema import (
    brokers,
    drained,
    groups,
    heard,
    leases,
    partition_parents,
    partitions,
    subjects,
)

ROWS_AT_ONCE = 2_000
"""Maximum number of rows of a table that one transaction deletes: statements on PostgreSQL time out
after 10 s, and other writers wait.
"""
_parent = partitions.alias("parent")
_unexpired_parent = (
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
_has_drained = sa.select(sa.literal(1)).where(
    drained.c.group_id == leases.c.group_id, drained.c.partition_id == leases.c.partition_id
)
_undrained_holder = (
    sa.select(sa.literal(1))
    .select_from(groups.join(leases, leases.c.group_id == groups.c.group_id))
    .where(
        groups.c.subject_id == partitions.c.subject_id,
        leases.c.partition_id == partitions.c.partition_id,
        leases.c.session.is_not(None),
        sa.not_(sa.exists(_has_drained.correlate(leases))),
    )
    .correlate(partitions)
)
_may_expire = sa.and_(
    partitions.c.state == PartitionState.SEALED,
    partitions.c.end_offset.is_not(None),
    sa.not_(sa.exists(_unexpired_parent)),
    sa.not_(sa.exists(_undrained_holder)),
)


_live_broker_groups = sa.select(brokers.c.broker_group).where(brokers.c.expires_at > now_ms())
_candidates = (
    sa.select(partitions.c.partition_id, partitions.c.end_offset)
    .where(_may_expire, partitions.c.partition_id > sa.bindparam("after"))
    .where(partitions.c.broker_group.in_(_live_broker_groups))
    .order_by(partitions.c.partition_id)
    .limit(sa.bindparam("most", type_=sa.Integer))
)


def expiry_candidates(
    connection: Connection, *, after: int, limit: int
) -> list[tuple[Partition, int]]:
    """Return the next partitions on live brokers that may expire, with their end offsets, ordered
    by id and starting above `after`.
    """
    rows = connection.execute(_candidates, {"after": after, "most": limit})
    end_offsets = {row.partition_id: row.end_offset for row in rows}
    if not end_offsets:
        return []
    candidates = read_partitions(connection, BY_ID, ids=list(end_offsets))
    return [(partition, end_offsets[partition.partition_id]) for partition in candidates]


def mark_expired(connection: Connection, ends: Mapping[int, int]) -> Sequence[Subject]:
    """
    Mark partitions as EXPIRED and raise the versions of their routes.

    Args:
        ends: maps the ids of partitions whose brokers have no messages left to their end offsets.

    Returns:
        The subjects whose routes changed.
    """
    subject_ids = sa.select(partitions.c.subject_id).where(partitions.c.partition_id.in_(ends))
    lock_query = sa.select(subjects.c.subject_id).where(subjects.c.subject_id.in_(subject_ids))
    # The lock order is the same as when an operation begins: subjects by name, then partitions.
    connection.execute(lock_query.order_by(subjects.c.name).with_for_update()).all()
    changed_ids: set[int] = set()
    for partition_id, end_offset in sorted(ends.items()):
        is_still_empty = sa.and_(
            partitions.c.partition_id == partition_id,
            partitions.c.end_offset == end_offset,
            _may_expire,
        )
        expire_row = (
            sa.update(partitions)
            .where(is_still_empty)
            .values(state=PartitionState.EXPIRED)
            .returning(partitions.c.subject_id)
        )
        changed_ids |= set(connection.execute(expire_row).scalars())
    raise_versions = (
        sa.update(subjects)
        .where(subjects.c.subject_id.in_(changed_ids))
        .values(route_version=subjects.c.route_version + 1)
        .returning(subjects.c.name)
    )
    return [Subject(name) for name in connection.execute(raise_versions).scalars()]


_is_free = sa.and_(leases.c.session.is_(None), leases.c.wanted.is_(None))
"""True for a lease that no session holds or is waiting for, so that it can no longer be
released.
"""
_PROGRESS = ((drained, sa.true()), (heard, sa.true()), (leases, _is_free))
"""The tables with a row for each group and partition, each with the condition for deleting rows."""


def _progress_on_removed(table: sa.Table, is_deletable: sa.ColumnElement[bool]) -> sa.Select[Any]:
    """Select the deletable rows of a table that belong to removed partitions of some subjects."""
    return (
        sa.select(table.c.group_id, table.c.partition_id)
        .join(groups, groups.c.group_id == table.c.group_id)
        .join(subjects, subjects.c.subject_id == groups.c.subject_id)
        .join(partitions, partitions.c.partition_id == table.c.partition_id)
        .where(
            subjects.c.name.in_(sa.bindparam("names")),
            is_expired_by_retention(partitions),
            is_deletable,
        )
        .order_by(table.c.group_id, table.c.partition_id)
        .limit(sa.bindparam("most", type_=sa.Integer))
    )


_DELETIONS = tuple(
    (
        _progress_on_removed(table, is_deletable),
        sa.delete(table).where(
            table.c.group_id == sa.bindparam("of_group"),
            table.c.partition_id.in_(sa.bindparam("ids", expanding=True)),
            is_deletable,
        ),
    )
    for table, is_deletable in _PROGRESS
)


_deletable_ids = sa.union_all(
    *(
        sa.select(table.c.partition_id)
        .join(groups, groups.c.group_id == table.c.group_id)
        .where(is_deletable)
        for table, is_deletable in _PROGRESS
    )
)
# Starts from the rows of groups, because their number is limited, unlike that of removed
# partitions.
_subjects_with_removed = (
    sa.select(subjects.c.name)
    .where(
        subjects.c.name > sa.bindparam("after"),
        subjects.c.subject_id.in_(
            sa.select(partitions.c.subject_id).where(
                partitions.c.partition_id.in_(_deletable_ids), is_expired_by_retention(partitions)
            )
        ),
    )
    .order_by(subjects.c.name)
    .limit(sa.bindparam("most", type_=sa.Integer))
)


def subjects_with_removed_progress(
    connection: Connection, *, after: str, limit: int
) -> list[Subject]:
    """Return the next subjects whose groups have deletable rows for removed partitions, ordered by
    name and starting above `after`.
    """
    rows = connection.execute(_subjects_with_removed, {"after": after, "most": limit})
    return [Subject(name) for name in rows.scalars()]


def delete_progress(connection: Connection, names: Sequence[Subject]) -> bool:
    """
    Delete the progress of these subjects' groups on removed partitions. Nothing depends on it any
    longer.

    Returns:
        True if more rows remain; the caller should continue in another transaction.
    """
    has_more = False
    for select_rows, delete_rows in _DELETIONS:
        ids: dict[int, list[int]] = {}
        rows = connection.execute(select_rows, {"names": list(names), "most": ROWS_AT_ONCE}).all()
        for group_id, partition_id in rows:
            ids.setdefault(group_id, []).append(partition_id)
        lock_groups(connection, ids)
        for group_id, partition_ids in ids.items():
            connection.execute(delete_rows, {"of_group": group_id, "ids": partition_ids})
        has_more = has_more or len(rows) == ROWS_AT_ONCE
    return has_more


log = logging.getLogger("keylane.metaserver")

DUTY = "expiry"
CALL_TIMEOUT_MS = 2_000
CONCURRENT_CALLS_MAX = 8
CANDIDATES_MAX = 256
"""Maximum number of partitions in one round; the next round continues from there."""
SUBJECTS_AT_ONCE = 100
"""Number of subjects whose rows are deleted by one statement."""


class PartitionExpirer:
    """
    Expires partitions that have no messages left.

    Args:
        holder: this metaserver's unique id.
    """

    def __init__(
        self,
        database: Database,
        network: Network,
        settings: MetaserverSettings,
        *,
        catalogue: Catalogue,
        holder: str,
    ) -> None:
        self._database = database
        self._network = network
        self._lease_ms = 2 * settings.expire_ms
        self._catalogue = catalogue
        self._holder = holder
        self._after = 0

    async def run_once(self) -> int:
        """Expire the partitions that can expire and return their number. Raises StorageError."""
        has_duty = await self._database.renew(
            take_duty, DUTY, holder=self._holder, lease_ms=self._lease_ms
        )
        if not has_duty:
            return 0
        expired_count = await self._expire()
        await self._delete_progress()
        return expired_count

    async def _expire(self) -> int:
        """Expire empty partitions page by page, until a page has none. Return their number."""
        expired_count = 0
        while True:
            candidates = await self._database.read(
                expiry_candidates, after=self._after, limit=CANDIDATES_MAX
            )
            is_full_page = len(candidates) == CANDIDATES_MAX
            self._after = candidates[-1][0].partition_id if is_full_page else 0
            slots = asyncio.Semaphore(CONCURRENT_CALLS_MAX)
            emptiness = await asyncio.gather(
                *(self._is_empty(partition, end, slots) for partition, end in candidates)
            )
            ends = {
                int(partition.partition_id): end
                for (partition, end), is_empty in zip(candidates, emptiness, strict=True)
                if is_empty
            }
            if not ends:
                return expired_count
            changed_subjects = await self._database.write(mark_expired, ends)
            self._catalogue.wake_route_waiters(changed_subjects)
            expired_count += len(ends)
            log.info("expired: partitions %s", ", ".join(map(str, sorted(ends))))

    async def _delete_progress(self) -> None:
        """Delete the progress of groups on removed partitions, including partitions that were
        marked by an earlier run that was interrupted.
        """
        last_name, is_full_page = "", True
        while is_full_page:
            names = await self._database.read(
                subjects_with_removed_progress, after=last_name, limit=SUBJECTS_AT_ONCE
            )
            is_full_page = len(names) == SUBJECTS_AT_ONCE
            has_more = bool(names)
            while has_more:
                has_more = await self._database.write(delete_progress, names)
            last_name = names[-1] if is_full_page else ""

    async def _is_empty(
        self, partition: Partition, end_offset: int, slots: asyncio.Semaphore
    ) -> bool:
        """Return True if a sealed partition has no messages left, according to its broker."""
        if partition.address is None:
            return False
        broker = BrokerClient(self._network, partition.address, timeout_ms=CALL_TIMEOUT_MS)
        async with slots:
            try:
                status = await broker.control(endpoints.PARTITION, id=partition.partition_id)
            except KeylaneError as error:
                log.debug("partition %d: %s", partition.partition_id, error.message)
                return False
        is_sealed = status.state is PartitionState.SEALED
        return is_sealed and status.first_offset == status.next_offset == end_offset
