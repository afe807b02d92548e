"""Which brokers have to hear of which consumer groups, and which have.  SQL, synchronous.

    group made ─▶ not `told` ─▶ brokers of its subject's partitions hear of it, a row of `heard` each ─▶ `told`
    partition planned ─▶ hosted with all groups, a row of `heard` each ─▶ opened, when no row is missing

Where time alone counts nobody has to hear of a group.  A group that is through with a partition needs nothing there.

Invariants
    A row of `heard` is written after the broker has the group on its disk, and for no other reason: a grant is none.
    The rows of a broker group go when it goes on with an older copy of its data folder.
    A partition is granted to a group, and is opened, only with this row; so what is removed before it was never the
    group's.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from ...protocol.control import Retention
from ...protocol.routing import PartitionState
from ..sql.dialect import insert_new, now_ms
from ..sql.schema import accepted_folders, brokers, drained, groups, heard, partitions, subjects
from .subjects import SERVED
from .unsettled import mark_unsettled


@dataclass(frozen=True, slots=True, kw_only=True)
class Announcement:
    """A partition, where it is, and every group of its subject that is to read it: (id, name)."""

    partition_id: int
    address: str
    groups: tuple[tuple[int, str], ...]


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
        subjects.c.retention == Retention.ACKED,
        sa.not_(sa.exists(_has_heard)),
        sa.not_(sa.exists(_through)),
    )
)
"""Partitions with a group that they have not heard of and that needs them; a row for each pair."""
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
    """How many groups some broker may not have heard of."""
    return connection.execute(_untold).scalar_one()


def unheard_partitions(
    connection: Connection, *, limit: int, after: int = 0, group_id: int | None = None
) -> list[Announcement]:
    """
    Partitions on live brokers that have not heard of a group, by id from `after` on, each with all of its groups.

    Args:
        limit: of partitions.
        group_id: those only that have not heard of this group.
    """
    which: dict[str, Any] = {"after": after, "most": limit}
    if group_id is None:
        found = connection.execute(_unheard, which)
    else:
        found = connection.execute(_unheard_of_one, which | {"of_group": group_id})
    return read_announcements(connection, found.scalars().all())


def begin_announcement(connection: Connection, group_id: int, *, limit: int) -> list[Announcement]:
    """As `unheard_partitions` of one group, after the group is on the database's disk: no broker keeps one of which
    the database knows nothing after a crash.
    """
    mark_unsettled(connection, group_id)
    return unheard_partitions(connection, limit=limit, group_id=group_id)


_told = (
    sa.select(partitions.c.partition_id, brokers.c.address, groups.c.group_id, groups.c.name)
    .select_from(partitions)
    .join(brokers, brokers.c.broker_group == partitions.c.broker_group)
    .outerjoin(
        groups,
        sa.and_(
            groups.c.subject_id == partitions.c.subject_id,
            sa.not_(sa.exists(_through)),
            partitions.c.state.in_(SERVED),
        ),
    )
    .where(
        partitions.c.partition_id.in_(sa.bindparam("ids", expanding=True)),
        partitions.c.state != PartitionState.PLANNED,
        brokers.c.expires_at > now_ms(),
    )
    .order_by(partitions.c.partition_id, groups.c.group_id)
)


def read_announcements(connection: Connection, ids: Sequence[int]) -> list[Announcement]:
    """Those of these partitions whose brokers live, each with all groups that are to read it, perhaps none."""
    found: dict[int, Announcement] = {}
    for row in connection.execute(_told, {"ids": list(ids)}) if ids else ():
        before = found.get(row.partition_id)
        known = () if before is None else before.groups
        if row.group_id is not None:
            known = (*known, (row.group_id, row.name))
        found[row.partition_id] = Announcement(
            partition_id=row.partition_id, address=row.address, groups=known
        )
    return list(found.values())


def note_heard(connection: Connection, told: Sequence[Announcement]) -> None:
    """The brokers of these partitions have these groups on their disks: the groups may be granted them."""
    ids = sorted({group_id for one in told for group_id, _ in one.groups})
    _lock_groups(connection, ids)
    news = store_heard(
        connection, {one.partition_id: [key for key, _ in one.groups] for one in told}
    )
    for group_id in sorted(news):
        mark_unsettled(connection, group_id)


def store_heard(connection: Connection, pairs: dict[int, list[int]]) -> set[int]:
    """Store that the broker of each partition has heard of these groups; the groups for which that was news."""
    known = {
        (row.partition_id, row.group_id)
        for row in connection.execute(sa.select(heard).where(heard.c.partition_id.in_(pairs)))
    }
    rows = [
        {"group_id": group_id, "partition_id": partition_id}
        for partition_id, some in pairs.items()
        for group_id in some
        if (partition_id, group_id) not in known
    ]
    insert_new(connection, heard, rows)
    return {row["group_id"] for row in rows}


_waiting = (
    _pairs.with_only_columns(groups.c.group_id)
    .where(sa.not_(groups.c.told), partitions.c.state.in_(SERVED))
    .distinct()
)


def mark_told(connection: Connection) -> None:
    """Groups of which every broker has heard that has to are looked at no more; silent brokers count as well."""
    every = sa.select(groups.c.group_id).where(sa.not_(groups.c.told))
    ids = sorted(connection.execute(every).scalars())
    _lock_groups(connection, ids)
    waiting = set(connection.execute(_waiting).scalars())
    done = [one for one in ids if one not in waiting]
    if done:
        connection.execute(sa.update(groups).where(groups.c.group_id.in_(done)).values(told=True))


def groups_missed(connection: Connection, broker_group: str) -> bool:
    """Whether a partition of a broker group that goes on with an accepted copy has not heard of a group that needs it."""
    accepted = sa.select(sa.literal(1)).where(accepted_folders.c.broker_group == broker_group)
    here = _pairs.where(
        sa.exists(accepted),
        partitions.c.broker_group == broker_group,
        partitions.c.state.in_(SERVED),
        sa.not_(groups.c.told),
    )
    return connection.execute(here.limit(1)).first() is not None


def forget_heard(connection: Connection, broker_group: str) -> None:
    """The broker group goes on with a data folder that may lack consumer groups: tell it all of them again."""
    there = partitions.c.broker_group == broker_group
    inside = sa.select(partitions.c.subject_id).where(there)
    found = sa.select(groups.c.group_id).where(groups.c.subject_id.in_(inside))
    ids = sorted(connection.execute(found).scalars())
    _lock_groups(connection, ids)
    hosted = sa.select(partitions.c.partition_id).where(there)
    connection.execute(sa.delete(heard).where(heard.c.partition_id.in_(hosted)))
    connection.execute(sa.update(groups).where(groups.c.group_id.in_(ids)).values(told=False))
    for group_id in ids:
        mark_unsettled(connection, group_id)


def unheard_children(
    connection: Connection, subject_id: int, children: Collection[int]
) -> list[int]:
    """Those of a subject's partitions to be whose brokers have not heard of each of its groups."""
    here = _pairs.where(
        partitions.c.subject_id == subject_id, partitions.c.partition_id.in_(children)
    )
    found = connection.execute(here.distinct().order_by(partitions.c.partition_id))
    return list(found.scalars())


def _lock_groups(connection: Connection, ids: Collection[int]) -> None:
    locked = sa.select(groups.c.group_id).where(groups.c.group_id.in_(ids))
    connection.execute(locked.order_by(groups.c.group_id).with_for_update()).all()
