"""Which brokers know which consumer groups, which groups still have to be announced, and which have
to be settled again. SQL, synchronous.

    group made ─▶ not `told` ─▶ announced to its brokers, with a row of `heard` for each ─▶ `told`
    partition planned ─▶ hosted with all groups, a row of `heard` for each ─▶ opened once all exist

This applies to subjects whose retention is by time alone as well: their brokers count the messages
that they remove before a group has read them. A group needs none of this for a partition that it
has drained. The groups of a hidden subject's target are announced when it is published.

Invariants
    A row of `heard` is written only after the broker has the group on its disk; a grant does not
    write one, nor does an answer from an earlier opening of the data folder.
    The rows of a broker group are deleted when an older copy of its data folder is accepted.
    A partition is granted to a group, and is opened, only with its row, so that retention removes
    nothing that the group was promised.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from ...protocol.routing import PartitionState
from ..sql.dialect import insert_new, now_ms, portions, rows_of
from ..sql.schema import accepted_folders, brokers, drained, groups, heard, partitions, subjects
from .brokers import read_openings
from .subjects import SERVED

PARTITIONS_MAX = 1_024
"""Most partitions that are announced at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Announcement:
    """A partition and its broker's address, with every group of its subject that is to read it, as
    (id, name).
    """

    partition_id: int
    address: str
    groups: tuple[tuple[int, str], ...]
    opening: str = ""
    """Opening of the data folder that gets the announcement; "" if the broker did not report it."""
    tokens_above: int = 0
    """Token that no token of the subject's deleted groups exceeds."""


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
_pairs = (
    sa.select(partitions.c.partition_id)
    .join(subjects, subjects.c.subject_id == partitions.c.subject_id)
    .join(groups, groups.c.subject_id == subjects.c.subject_id)
    .where(
        sa.not_(groups.c.deleting),
        sa.not_(sa.exists(_has_heard)),
        sa.not_(sa.exists(_has_drained)),
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
_unannounced_count = sa.select(sa.func.count()).select_from(groups).where(sa.not_(groups.c.told))


def unannounced_groups(connection: Connection) -> int:
    """Count the groups that some broker may not know."""
    return connection.execute(_unannounced_count).scalar_one()


_announced = (
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
        # A hidden subject has no group: retention would remove its rows.
        subjects.c.hidden_for == "",
        brokers.c.expires_at > now_ms(),
    )
    .order_by(partitions.c.partition_id, groups.c.group_id)
)
_announcements_by_id = _announced.where(
    partitions.c.partition_id.in_(sa.bindparam("ids", expanding=True))
)
_unheard_announcements = _announced.where(partitions.c.partition_id.in_(_unheard))
_unheard_announcements_of_group = _announced.where(partitions.c.partition_id.in_(_unheard_of_one))


def unheard_partitions(
    connection: Connection, *, after: int = 0, group_id: int | None = None
) -> list[Announcement]:
    """
    Return the partitions on live brokers that do not know one of their groups, each with all of its
    groups, by id.

    There are at most `PARTITIONS_MAX`; the caller continues after them, even if their brokers did
    not answer.

    Args:
        after: lower limit of the partition ids, exclusive.
        group_id: return only partitions whose brokers do not know this group.
    """
    which: dict[str, Any] = {"after": after, "most": PARTITIONS_MAX}
    if group_id is None:
        return _announcements(connection.execute(_unheard_announcements, which))
    return _announcements(
        connection.execute(_unheard_announcements_of_group, which | {"of_group": group_id})
    )


def begin_announcement(connection: Connection, group_id: int) -> list[Announcement]:
    """Return `unheard_partitions` of one group, in a durable write: after a crash no broker has a
    group that SQL lacks.
    """
    mark_unsettled(connection, group_id)
    return unheard_partitions(connection, group_id=group_id)


def read_announcements(connection: Connection, ids: Sequence[int]) -> list[Announcement]:
    """Return those of the given partitions whose brokers are alive, each with all groups that are
    to read it.
    """
    return (
        _announcements(connection.execute(_announcements_by_id, {"ids": list(ids)})) if ids else []
    )


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
    connection: Connection, answered: Sequence[Announcement], *, settling: int | None = None
) -> bool:
    """
    Store that the brokers have these groups on their disks, so that the groups may be granted the
    partitions.

    An answer from an earlier opening does not count, because the data folder may be an older copy
    by now: the groups are announced again.

    Args:
        settling: id of a group that is settled in the same transaction, and need not be marked
            unsettled.

    Returns:
        True if that group may be granted more partitions than before.
    """
    ids = sorted({group_id for announcement in answered for group_id, _ in announcement.groups})
    left = lock_groups(connection, ids)
    there = [announcement.partition_id for announcement in answered]
    openings = read_openings(connection, there)  # under the locks
    news = store_heard(
        connection,
        {
            announcement.partition_id: [
                group_id for group_id, _ in announcement.groups if group_id in left
            ]
            for announcement in answered
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
    Store partition id → groups that its broker knows; deleted partitions are skipped.

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


def mark_announced(connection: Connection) -> None:
    """Mark the groups as announced that every broker that needs them knows, silent brokers
    included. Groups whose rows are locked elsewhere have to wait for the next call.
    """
    unannounced = sa.select(groups.c.group_id).where(sa.not_(groups.c.told))
    ids = sorted(
        lock_groups(connection, list(connection.execute(unannounced).scalars()), skip_held=True)
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
    """Delete the record of the groups that a broker group knows, so that all are announced again:
    its data folder may lack some.
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
    """Lock the groups that exist, and return their ids; `skip_held` skips those whose rows another
    transaction has locked.
    """
    locked = _locked_at_once if skip_held else _locked
    return {group_id for (group_id,) in rows_of(connection, locked, ids)}


_unsettled = (
    sa.update(groups).where(groups.c.group_id == sa.bindparam("of_group")).values(**_UNSETTLED)
)


def mark_unsettled(connection: Connection, group_id: int) -> None:
    """Mark a group's leases as unsettled; locks the group until the transaction ends."""
    connection.execute(_unsettled, {"of_group": group_id})
