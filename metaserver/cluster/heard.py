"""Which brokers know which consumer groups, which still have to be told, which groups settle again.
SQL, synchronous.

    group made ─▶ not `told` ─▶ the brokers of its partitions are told, a row of `heard` for each ─▶ `told`
    partition planned ─▶ hosted with all groups, a row of `heard` for each ─▶ opened when no row is missing

Subjects whose retention is by time alone as well: there brokers count what they remove before a
group has read it. A group on a partition that it has drained needs none of this. Brokers of a
hidden subject are told when it is published, of the groups of its target.

Invariants
    A row of `heard` is written only after the broker has the group on its disk; a grant does not
    write one.  What an earlier opening of the data folder has answered writes none. The rows of a
    broker group are deleted when an older copy of its data folder is accepted. A partition is
    granted to a group, and is opened, only with its row: retention removes nothing that the group
    was promised.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from ...protocol.routing import PartitionState
from ..sql.dialect import insert_new, now_ms
from ..sql.portions import portions, rows_of
from ..sql.schema import accepted_folders, brokers, drained, groups, heard, partitions, subjects
from .brokers import read_openings
from .subjects import SERVED

PARTITIONS_MAX = 1_024
"""Brokers are told of at most this number at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Announcement:
    """A partition, its broker's address, and every group of its subject that is to read it, as (id,
    name).
    """

    partition_id: int
    address: str
    groups: tuple[tuple[int, str], ...]
    opening: str = ""
    """The opening of the data folder that is told; "" of a broker that does not say it."""
    tokens_above: int = 0
    """Every token of the subject's deleted groups is at most this."""


_has_heard = (
    sa.select(sa.literal(1))
    .where(
        heard.c.group_id == groups.c.group_id,
        heard.c.partition_id == partitions.c.partition_id,
    )
    .correlate(groups, partitions)
)
_through = (
    sa.select(sa.literal(1))
    .where(
        drained.c.group_id == groups.c.group_id,
        drained.c.partition_id == partitions.c.partition_id,
    )
    .correlate(groups, partitions)
)
_pairs = (
    sa.select(partitions.c.partition_id)
    .join(subjects, subjects.c.subject_id == partitions.c.subject_id)
    .join(groups, groups.c.subject_id == subjects.c.subject_id)
    .where(
        sa.not_(groups.c.deleting),
        sa.not_(sa.exists(_has_heard)),
        sa.not_(sa.exists(_through)),
    )
)
"""Partitions, once for each group that needs them and that their brokers do not know."""
_unheard = (
    _pairs.join(brokers, brokers.c.broker_group == partitions.c.broker_group)
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
_unheard_of_one = _unheard.where(groups.c.group_id == sa.bindparam("of_group"))
_untold = sa.select(sa.func.count()).select_from(groups).where(sa.not_(groups.c.told))


def untold_groups(connection: Connection) -> int:
    """Count the groups that some broker may not know."""
    return connection.execute(_untold).scalar_one()


_told = (
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
            sa.not_(sa.exists(_through)),
            partitions.c.state.in_(SERVED),
        ),
    )
    .where(
        partitions.c.state != PartitionState.PLANNED,
        # A hidden subject has no group: retention would remove its rows.
        subjects.c.hidden_for == "",
        brokers.c.expires_at > now_ms(),
    )
    .order_by(partitions.c.partition_id, groups.c.group_id)
)
_told_by_id = _told.where(partitions.c.partition_id.in_(sa.bindparam("ids", expanding=True)))
_told_unheard = _told.where(partitions.c.partition_id.in_(_unheard))
_told_unheard_of_one = _told.where(partitions.c.partition_id.in_(_unheard_of_one))


def unheard_partitions(
    connection: Connection, *, after: int = 0, group_id: int | None = None
) -> list[Announcement]:
    """
    Return partitions on live brokers that do not know one of their groups, each with all of its
    groups, by id.

    There are at most `PARTITIONS_MAX`; a caller goes on after them, whether they were told or not.

    Args:
        after: only partitions with higher ids.
        group_id: only partitions whose brokers do not know this group.
    """
    which: dict[str, Any] = {"after": after, "most": PARTITIONS_MAX}
    if group_id is None:
        return _announcements(connection.execute(_told_unheard, which))
    return _announcements(connection.execute(_told_unheard_of_one, which | {"of_group": group_id}))


def begin_announcement(connection: Connection, group_id: int) -> list[Announcement]:
    """As `unheard_partitions` of one group, in a durable write: after a crash no broker has a group
    that SQL lacks.
    """
    mark_unsettled(connection, group_id)
    return unheard_partitions(connection, group_id=group_id)


def read_announcements(connection: Connection, ids: Sequence[int]) -> list[Announcement]:
    """Return these partitions as far as their brokers are alive, each with all groups that are to
    read it.
    """
    return _announcements(connection.execute(_told_by_id, {"ids": list(ids)})) if ids else []


def _announcements(rows: Iterable[sa.Row[Any]]) -> list[Announcement]:
    announcements: dict[int, Announcement] = {}
    for row in rows:
        before = announcements.get(row.partition_id)
        known = () if before is None else before.groups
        if row.group_id is not None:
            known = (*known, (row.group_id, row.name))
        announcements[row.partition_id] = Announcement(
            partition_id=row.partition_id,
            address=row.address,
            opening=row.opening,
            groups=known,
            tokens_above=row.tokens_above,
        )
    return list(announcements.values())


def note_heard(
    connection: Connection, told: Sequence[Announcement], *, settling: int | None = None
) -> bool:
    """
    Note that the brokers have these groups on their disks: the groups may be granted the
    partitions.

    A broker that was told in an earlier opening is told again: its data folder may be an older copy
    by now.

    Args:
        settling: a group that is settled in the same transaction, and not marked for it.

    Returns:
        Whether that group may be granted more than before.
    """
    ids = sorted({group_id for announcement in told for group_id, _ in announcement.groups})
    left = lock_groups(connection, ids)
    there = [announcement.partition_id for announcement in told]
    openings = read_openings(connection, there)  # under the locks
    news = store_heard(
        connection,
        {
            announcement.partition_id: [
                group_id for group_id, _ in announcement.groups if group_id in left
            ]
            for announcement in told
            if openings.get(announcement.partition_id) == announcement.opening
        },
    )
    for group_id in sorted(news - {settling}):
        mark_unsettled(connection, group_id)
    return settling in news


_there = (
    sa.select(partitions.c.partition_id, heard.c.group_id)
    .outerjoin(heard, heard.c.partition_id == partitions.c.partition_id)
    .where(partitions.c.partition_id.in_(sa.bindparam("ids", expanding=True)))
)


def store_heard(connection: Connection, pairs: dict[int, list[int]]) -> set[int]:
    """
    Store partition id → groups that its broker knows; partitions that were deleted meanwhile are
    left out.

    Returns:
        The ids of the groups with a new row.
    """
    there = connection.execute(_there, {"ids": list(pairs)})
    known = {(row.partition_id, row.group_id) for row in there}
    left = {partition_id for partition_id, _ in known}
    rows = [
        {"group_id": group_id, "partition_id": partition_id}
        for partition_id, group_ids in pairs.items()
        for group_id in group_ids
        if partition_id in left and (partition_id, group_id) not in known
    ]
    insert_new(connection, heard, rows)
    return {row["group_id"] for row in rows}


_waiting = (
    _pairs.with_only_columns(groups.c.group_id)
    .where(sa.not_(groups.c.told), partitions.c.state.in_(SERVED))
    .distinct()
)


def mark_told(connection: Connection) -> None:
    """Mark the groups as told that every broker knows that has to, silent brokers included; a held
    one at the next call.
    """
    untold = sa.select(groups.c.group_id).where(sa.not_(groups.c.told))
    ids = sorted(
        lock_groups(connection, list(connection.execute(untold).scalars()), skip_held=True)
    )
    waiting = set(connection.execute(_waiting).scalars())
    for done in portions([group_id for group_id in ids if group_id not in waiting]):
        connection.execute(sa.update(groups).where(groups.c.group_id.in_(done)).values(told=True))


def groups_missed(connection: Connection, broker_group: str) -> bool:
    """Return whether the broker group runs on an accepted copy and has a partition that does not
    know a group it needs.
    """
    accepted = sa.select(sa.literal(1)).where(accepted_folders.c.broker_group == broker_group)
    here = _pairs.where(
        sa.exists(accepted),
        partitions.c.broker_group == broker_group,
        partitions.c.state.in_(SERVED),
        sa.not_(groups.c.told),
    )
    return connection.execute(here.limit(1)).first() is not None


_UNSETTLED: dict[str, Any] = {
    "settled": False,
    "version": groups.c.version + 1,
    "idle_since": None,
}


def forget_heard(connection: Connection, broker_group: str) -> None:
    """Delete what a broker group was told, so that it is told all groups again: its data folder may
    lack some.
    """
    there = partitions.c.broker_group == broker_group
    inside = sa.select(partitions.c.subject_id).where(there)
    chosen = sa.select(groups.c.group_id).where(groups.c.subject_id.in_(inside))
    ids = sorted(connection.execute(chosen).scalars())
    lock_groups(connection, ids)
    hosted = sa.select(partitions.c.partition_id).where(there)
    connection.execute(sa.delete(heard).where(heard.c.partition_id.in_(hosted)))
    for some in portions(ids):
        here = groups.c.group_id.in_(some)
        connection.execute(sa.update(groups).where(here).values(told=False, **_UNSETTLED))


def unheard_children(
    connection: Connection, subject_id: int, children: Collection[int]
) -> list[int]:
    """Return the ids of those children whose brokers do not know every group of their subject."""
    here = _pairs.where(
        partitions.c.subject_id == subject_id, partitions.c.partition_id.in_(children)
    )
    ids = connection.execute(here.distinct().order_by(partitions.c.partition_id))
    return list(ids.scalars())


_chosen = (
    sa.select(groups.c.group_id)
    .where(groups.c.group_id.in_(sa.bindparam("ids", expanding=True)))
    .order_by(groups.c.group_id)
)
_locked, _locked_at_once = (_chosen.with_for_update(skip_locked=skip) for skip in (False, True))


def lock_groups(
    connection: Connection, ids: Collection[int], *, skip_held: bool = False
) -> set[int]:
    """Lock the groups that exist, and return their ids; `skip_held` passes over those whose rows
    another transaction holds.
    """
    locked = _locked_at_once if skip_held else _locked
    return {group_id for (group_id,) in rows_of(connection, locked, ids)}


_unsettled = (
    sa.update(groups).where(groups.c.group_id == sa.bindparam("of_group")).values(**_UNSETTLED)
)


def mark_unsettled(connection: Connection, group_id: int) -> None:
    """Note that a group's leases have to be settled; locks the group until the transaction ends."""
    connection.execute(_unsettled, {"of_group": group_id})
