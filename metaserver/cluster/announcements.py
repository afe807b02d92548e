"""Records which brokers know which consumer groups, and which groups must still be announced. Runs
SQL synchronously.

    group created ─▶ `told` is false ─▶ announced to its brokers, a `heard` row for each ─▶ `told`
    partition planned ─▶ hosted with all groups, a `heard` row for each ─▶ opened once all exist

This also applies to subjects with purely time-based retention, because their brokers count the
messages that they remove before a group has read them. A group needs no `heard` row for a partition
that it has drained. The groups of a hidden subject's target are announced when it is published.

Invariants
    A row of `heard` is written only after the broker has stored the group durably; neither a grant
    nor a reply from an earlier opening of the data folder causes one to be written.
    The rows of a broker group are deleted when an older copy of its data folder is accepted.
    A partition is opened only when every group of its subject has a row for it, and it is granted
    to a group only if that group has a row for it. So retention never removes messages that the
    group may still read.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from ...protocol.control import Retention
from ...protocol.routing import PartitionState
from ..sql.dialect import insert_new, now_ms, read_in_chunks, split_ids
from ..sql.schema import (
    accepted_folders,
    brokers,
    drained,
    groups,
    heard,
    lost_folders,
    partitions,
    subjects,
)
from .brokers import read_openings
from .subjects import SERVED

PARTITIONS_MAX = 1_024
"""Maximum number of partitions in one batch of announcements."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Announcement:
    """A partition, the address of its broker, and the groups that will read it, as (id, name)."""

    partition_id: int
    address: str
    groups: tuple[tuple[int, str], ...]
    opening: str = ""
    """Opening of the broker's data folder; "" if the broker did not report it."""
    tokens_above: int = 0
    """Upper bound of the tokens of the subject's deleted groups."""


_has_heard = (
    sa.select(sa.literal(1))
    .where(
        heard.c.group_id == groups.c.group_id,
        heard.c.partition_id == partitions.c.partition_id,
    )
    .correlate(groups, partitions)
)
_has_drained = (
    sa.select(sa.literal(1))
    .where(
        drained.c.group_id == groups.c.group_id,
        drained.c.partition_id == partitions.c.partition_id,
    )
    .correlate(groups, partitions)
)
_unheard_pairs = (
    sa.select(partitions.c.partition_id)
    .join(subjects, subjects.c.subject_id == partitions.c.subject_id)
    .join(groups, groups.c.subject_id == subjects.c.subject_id)
    .where(
        sa.not_(groups.c.deleting),
        sa.not_(sa.exists(_has_heard)),
        sa.not_(sa.exists(_has_drained)),
    )
)
"""Pairs of a partition and a group that will read it but that its broker does not know yet."""
_unheard_ids = (
    _unheard_pairs.join(brokers, brokers.c.broker_group == partitions.c.broker_group)
    .where(
        sa.not_(groups.c.told),
        partitions.c.state.in_(SERVED),
        partitions.c.partition_id > sa.bindparam("after"),
        brokers.c.expires_at > now_ms(),
    )
    .distinct()
    .order_by(partitions.c.partition_id)
    .limit(sa.bindparam("most"))
)
_unheard_ids_of_group = _unheard_ids.where(groups.c.group_id == sa.bindparam("of_group"))
_unannounced_count = sa.select(sa.func.count()).select_from(groups).where(sa.not_(groups.c.told))
_is_refused = (
    sa.select(sa.literal(1))
    .where(lost_folders.c.broker_id == brokers.c.broker_id)
    .correlate(brokers)
)
_takes_messages = sa.or_(
    partitions.c.state == PartitionState.OPEN,
    sa.and_(
        partitions.c.state == PartitionState.SEALED,
        partitions.c.abandoned,
        partitions.c.end_offset.is_(None),
        brokers.c.expires_at > now_ms(),
    ),
)
"""True for partitions that producers may still send to. An abandoned partition is only sealed after
its broker has returned; nothing waits for it while the broker is silent.
"""
unheard_ids_of_group = _unheard_pairs.join(
    brokers, brokers.c.broker_group == partitions.c.broker_group
).where(
    groups.c.group_id == sa.bindparam("of_group"),
    sa.not_(groups.c.told),
    subjects.c.retention == Retention.ACKED,
    _takes_messages,
    sa.not_(sa.exists(_is_refused)),  # nothing is ever sent to a refused folder
)
"""The ids of the partitions that may get messages from now on and remove them before a group has
read them, because their brokers, alive or silent, do not know the group.
"""


def unannounced_groups(connection: Connection) -> int:
    """Return the number of groups that some brokers may not know yet."""
    return connection.execute(_unannounced_count).scalar_one()


_announcements_query = (
    sa.select(
        partitions.c.partition_id,
        brokers.c.address,
        brokers.c.opening,
        groups.c.group_id,
        groups.c.name,
        subjects.c.tokens_above,
    )
    .select_from(partitions)
    .join(subjects, subjects.c.subject_id == partitions.c.subject_id)
    .join(brokers, brokers.c.broker_group == partitions.c.broker_group)
    .outerjoin(
        groups,
        sa.and_(
            groups.c.subject_id == partitions.c.subject_id,
            sa.not_(groups.c.deleting),
            sa.not_(sa.exists(_has_drained)),
            partitions.c.state.in_(SERVED),
        ),
    )
    .where(
        partitions.c.state != PartitionState.PLANNED,
        # A hidden subject has no groups, so retention would remove its messages.
        subjects.c.hidden_for == "",
        brokers.c.expires_at > now_ms(),
    )
    .order_by(partitions.c.partition_id, groups.c.group_id)
)
_announcements_by_id_query = _announcements_query.where(
    partitions.c.partition_id.in_(sa.bindparam("ids", expanding=True))
)
_unheard_announcements_query = _announcements_query.where(
    partitions.c.partition_id.in_(_unheard_ids)
)
_unheard_of_group_query = _announcements_query.where(
    partitions.c.partition_id.in_(_unheard_ids_of_group)
)


def pending_announcements(
    connection: Connection, *, after: int = 0, group_id: int | None = None
) -> list[Announcement]:
    """
    Return the announcements that must still be sent to live brokers, ordered by partition id.

    A partition is included if its broker does not know all of its groups. At most `PARTITIONS_MAX`
    announcements are returned; the caller continues after the last one, even if some brokers did
    not reply.

    Args:
        after: exclusive lower bound of the partition ids.
        group_id: only include partitions whose brokers do not know this group.
    """
    parameters: dict[str, Any] = {"after": after, "most": PARTITIONS_MAX}
    if group_id is None:
        return _group_by_partition(connection.execute(_unheard_announcements_query, parameters))
    return _group_by_partition(
        connection.execute(_unheard_of_group_query, parameters | {"of_group": group_id})
    )


def begin_announcement(connection: Connection, group_id: int) -> list[Announcement]:
    """Return the `pending_announcements` of one group. Must be called in a durable write, so that
    even after a crash no broker has a group that is missing in SQL.
    """
    mark_unsettled(connection, group_id)
    return pending_announcements(connection, group_id=group_id)


def read_announcements(connection: Connection, ids: Sequence[int]) -> list[Announcement]:
    """Return the announcements for those of the given partitions whose brokers are alive."""
    return (
        _group_by_partition(connection.execute(_announcements_by_id_query, {"ids": list(ids)}))
        if ids
        else []
    )


def _group_by_partition(rows: Iterable[sa.Row[Any]]) -> list[Announcement]:
    """Build one announcement per partition from rows ordered by partition."""
    announcements: dict[int, Announcement] = {}
    for row in rows:
        previous_announcement = announcements.get(row.partition_id)
        group_pairs = () if previous_announcement is None else previous_announcement.groups
        if row.group_id is not None:
            group_pairs = (*group_pairs, (row.group_id, row.name))
        announcements[row.partition_id] = Announcement(
            partition_id=row.partition_id,
            address=row.address,
            opening=row.opening,
            groups=group_pairs,
            tokens_above=row.tokens_above,
        )
    return list(announcements.values())


def record_announced(
    connection: Connection, announcements: Sequence[Announcement], *, settling_id: int | None = None
) -> bool:
    """
    Record that brokers have stored the announced groups, so that the groups may be granted the
    partitions.

    A reply from an earlier opening does not count, because the data folder may have been replaced
    by an older copy since then; in that case the groups are announced again.

    Args:
        announcements: the announcements that brokers have confirmed.
        settling_id: id of a group that is settled in the same transaction and need not be marked as
            unsettled.

    Returns:
        True if the group with the id `settling_id` may now be granted more partitions than before.
    """
    ids = sorted(
        {group_id for announcement in announcements for group_id, _ in announcement.groups}
    )
    existing_ids = lock_groups(connection, ids)
    partition_ids = [announcement.partition_id for announcement in announcements]
    openings = read_openings(connection, partition_ids)  # under the locks
    new_group_ids = store_announced(
        connection,
        {
            announcement.partition_id: [
                group_id for group_id, _ in announcement.groups if group_id in existing_ids
            ]
            for announcement in announcements
            if openings.get(announcement.partition_id) == announcement.opening
        },
    )
    for group_id in sorted(new_group_ids - {settling_id}):
        mark_unsettled(connection, group_id)
    return settling_id in new_group_ids


_current_query = (
    sa.select(partitions.c.partition_id, heard.c.group_id)
    .outerjoin(heard, heard.c.partition_id == partitions.c.partition_id)
    .where(partitions.c.partition_id.in_(sa.bindparam("ids", expanding=True)))
)


def store_announced(connection: Connection, groups_by_partition: dict[int, list[int]]) -> set[int]:
    """
    Record which groups the brokers of the given partitions know. Deleted partitions are skipped.

    Args:
        groups_by_partition: maps each partition id to the ids of the groups.

    Returns:
        The ids of the groups for which a new row was stored.
    """
    stored_rows = connection.execute(_current_query, {"ids": list(groups_by_partition)})
    stored_pairs = {(row.partition_id, row.group_id) for row in stored_rows}
    existing_ids = {partition_id for partition_id, _ in stored_pairs}
    rows = [
        {"group_id": group_id, "partition_id": partition_id}
        for partition_id, group_ids in groups_by_partition.items()
        for group_id in group_ids
        if partition_id in existing_ids and (partition_id, group_id) not in stored_pairs
    ]
    insert_new(connection, heard, rows)
    return {row["group_id"] for row in rows}


_unfinished_query = (
    _unheard_pairs.with_only_columns(groups.c.group_id)
    .where(sa.not_(groups.c.told), partitions.c.state.in_(SERVED))
    .distinct()
)


def mark_announced(connection: Connection) -> None:
    """Mark groups as announced once all their brokers know them, including silent brokers. Groups
    whose rows are locked by another transaction are skipped until the next call.
    """
    unannounced_query = sa.select(groups.c.group_id).where(sa.not_(groups.c.told))
    locked_ids = sorted(
        lock_groups(
            connection, list(connection.execute(unannounced_query).scalars()), skip_locked=True
        )
    )
    unfinished_ids = set(connection.execute(_unfinished_query).scalars())
    for chunk in split_ids([group_id for group_id in locked_ids if group_id not in unfinished_ids]):
        connection.execute(sa.update(groups).where(groups.c.group_id.in_(chunk)).values(told=True))


def lacks_announced_groups(connection: Connection, broker_group: str) -> bool:
    """Return True if the broker group runs on an accepted copy of its data folder and still lacks a
    group for one of its partitions.
    """
    is_accepted_copy = sa.select(sa.literal(1)).where(
        accepted_folders.c.broker_group == broker_group
    )
    query = _unheard_pairs.where(
        sa.exists(is_accepted_copy),
        partitions.c.broker_group == broker_group,
        partitions.c.state.in_(SERVED),
        sa.not_(groups.c.told),
    )
    return connection.execute(query.limit(1)).first() is not None


_UNSETTLED: dict[str, Any] = {
    "settled": False,
    "version": groups.c.version + 1,
    "idle_since": None,
}


def forget_announced(connection: Connection, broker_group: str) -> None:
    """Delete the records of which groups a broker group knows. All groups will be announced to it
    again, because its data folder may lack some of them.
    """
    is_on_broker = partitions.c.broker_group == broker_group
    subject_ids = sa.select(partitions.c.subject_id).where(is_on_broker)
    query = sa.select(groups.c.group_id).where(groups.c.subject_id.in_(subject_ids))
    ids = sorted(connection.execute(query).scalars())
    lock_groups(connection, ids)
    hosted_query = sa.select(partitions.c.partition_id).where(is_on_broker)
    connection.execute(sa.delete(heard).where(heard.c.partition_id.in_(hosted_query)))
    for chunk in split_ids(ids):
        is_in_chunk = groups.c.group_id.in_(chunk)
        connection.execute(sa.update(groups).where(is_in_chunk).values(told=False, **_UNSETTLED))


def unannounced_children(
    connection: Connection, subject_id: int, child_ids: Collection[int]
) -> list[int]:
    """Return the ids of those children whose brokers do not yet know all groups of the subject."""
    query = _unheard_pairs.where(
        partitions.c.subject_id == subject_id, partitions.c.partition_id.in_(child_ids)
    )
    ids = connection.execute(query.distinct().order_by(partitions.c.partition_id))
    return list(ids.scalars())


_groups_query = (
    sa.select(groups.c.group_id)
    .where(groups.c.group_id.in_(sa.bindparam("ids", expanding=True)))
    .order_by(groups.c.group_id)
)
_lock_query, _lock_skipping_query = (
    _groups_query.with_for_update(skip_locked=skip) for skip in (False, True)
)


def lock_groups(
    connection: Connection, ids: Collection[int], *, skip_locked: bool = False
) -> set[int]:
    """Lock the existing groups among `ids` and return their ids. With `skip_locked`, rows that
    another transaction has locked are skipped.
    """
    query = _lock_skipping_query if skip_locked else _lock_query
    return {group_id for (group_id,) in read_in_chunks(connection, query, ids)}


_set_unsettled = (
    sa.update(groups).where(groups.c.group_id == sa.bindparam("of_group")).values(**_UNSETTLED)
)


def mark_unsettled(connection: Connection, group_id: int) -> None:
    """Mark a group's leases as unsettled. This locks the group until the transaction ends."""
    connection.execute(_set_unsettled, {"of_group": group_id})
