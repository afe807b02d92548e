"""Finds the ancestors whose parked messages a granted partition adopts: SQL around one decision,
synchronous.

    parent: drained, with parked messages
        ─▶ always, but messages that were adopted already are not asked for again
    further ancestor: it alone was reset, and messages were parked there after the partitions in
    between were last granted
        ─▶ adopted past these
    all partitions in between are lost, with the messages that their owners had adopted
        ─▶ adopted past these

Invariant
    Messages that an owner of a partition in between could adopt come by way of that partition
    alone, unless it is lost: then the messages that the ancestor still has are handled, perhaps
    again.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from ...protocol.ids import PartitionId
from ...protocol.routing import Partition, PartitionState
from ..cluster.partitions import BY_ID, read_partitions, subject_parents
from ..sql.schema import drained, groups, leases, partitions

Ranges = tuple[tuple[int, int], ...]
"""Half-open ranges of logical partitions."""


class TakenOver(NamedTuple):
    """An ancestor from which a partition adopts parked messages."""

    partition: Partition
    token: int
    """Token of the group's last lease of the ancestor."""
    ranges: Ranges
    """Ranges that are adopted; (): the range of the adopting partition."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ancestor:
    """A partition in its role as an ancestor, for one group."""

    range_start: int
    range_end: int
    parents: tuple[PartitionId, ...] = ()
    token: int = 0
    """Token of the last lease; 0: there was none, or the partition is lost with the unfinished work
    of its owners.
    """
    passed: bool = False
    """True if the group has drained it or its loss was accepted, so that its children are read."""
    left: bool = False
    """True if the group has drained it and left parked messages there."""


def taken_over(partition: Partition, known: Mapping[PartitionId, Ancestor]) -> dict[int, Ranges]:
    """
    Return the ancestors whose parked messages of the group a partition adopts: id → ranges, as in
    `TakenOver`.

    An ancestor beyond the parents counts if its last lease is later than those of all partitions in
    between, because then none of these was granted after messages were parked there.
    """
    parents = [parent for parent in partition.parents if parent in known]
    direct: dict[int, Ranges] = {parent: () for parent in parents if known[parent].left}
    latest = max((each.token for each in known.values() if each.left), default=0)
    todo = [
        (parent, *_common(partition, known[parent]), known[parent].token)
        for parent in parents
        if known[parent].passed
    ]
    seen = set(todo)
    past: dict[int, set[tuple[int, int]]] = {}
    while todo:
        below, start, end, newest = todo.pop()
        if newest >= latest:
            continue
        for number in known[below].parents:
            ancestor = known.get(number)
            if ancestor is None:
                continue
            part = max(start, ancestor.range_start), min(end, ancestor.range_end)
            if (
                part[0] >= part[1]
            ):  # an empty range would be merged to (), which means the whole range
                continue
            if ancestor.left and ancestor.token > newest and number not in direct:
                past.setdefault(number, set()).add(part)
            step = (number, *part, max(newest, ancestor.token))
            if ancestor.passed and step not in seen:
                seen.add(step)
                todo.append(step)
    return direct | {number: _merged(parts) for number, parts in past.items()}


def noted_at_end(
    at_end: Iterable[Partition],
    known: Mapping[PartitionId, Ancestor],
    parked: Collection[int],
) -> list[int]:
    """
    Return, by id, those partitions at whose end a group is and that need no further owner.

    The others, and their children, first need an owner that adopts the messages left by ancestors.

    Args:
        at_end: sealed partitions whose parents the group has drained, or whose parents are among
            them.
        parked: ids of those that leave parked messages to their children.
    """
    facts = dict(known)
    noted: list[int] = []
    waiting: set[int] = set()
    for partition in sorted(at_end, key=lambda each: each.partition_id):
        number = partition.partition_id
        if taken_over(partition, facts) or not waiting.isdisjoint(partition.parents):
            waiting.add(number)
            continue
        noted.append(number)
        if number in facts:
            facts[number] = replace(facts[number], passed=True, left=number in parked)
    return noted


def _common(partition: Partition, ancestor: Ancestor) -> tuple[int, int]:
    start = max(partition.range_start, ancestor.range_start)
    return start, min(partition.range_end, ancestor.range_end)


def _merged(parts: Iterable[tuple[int, int]]) -> Ranges:
    merged: list[tuple[int, int]] = []
    for start, end in sorted(part for part in parts if part[0] < part[1]):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((start, end))
    return tuple(merged)


# ── SQL ───────────────────────────────────────────────────────────────────────────────────────────
_token = sa.func.coalesce(leases.c.token, 0)
_is_open = sa.or_(drained.c.partition_id.is_(None), drained.c.parked)
_token_kept = sa.case((sa.and_(partitions.c.lost, _is_open), 0), else_=_token)
"""Token of the last lease, but 0 for a lost partition whose work is unknown; the work of one that
was drained and left nothing is done.
"""
_of_lease = sa.and_(
    leases.c.group_id == sa.bindparam("of_group"),
    leases.c.partition_id == partitions.c.partition_id,
)
_of_drained = sa.and_(
    drained.c.group_id == sa.bindparam("of_group"),
    drained.c.partition_id == partitions.c.partition_id,
)
_left = (
    sa.select(
        drained.c.partition_id,
        drained.c.parked,
        _token.label("token"),
        _token_kept.label("token_kept"),
    )
    .join(partitions, partitions.c.partition_id == drained.c.partition_id)
    .outerjoin(
        leases,
        sa.and_(
            leases.c.group_id == drained.c.group_id,
            leases.c.partition_id == drained.c.partition_id,
        ),
    )
    .where(
        drained.c.group_id == sa.bindparam("of_group"),
        sa.or_(drained.c.parked, drained.c.partition_id.in_(sa.bindparam("parents"))),
    )
)
_subject = sa.select(groups.c.subject_id).where(groups.c.group_id == sa.bindparam("of_group"))
_known = (
    sa.select(
        partitions.c.partition_id,
        partitions.c.range_start,
        partitions.c.range_end,
        partitions.c.state,
        partitions.c.lost,
        drained.c.partition_id.is_not(None).label("drained"),
        sa.func.coalesce(drained.c.parked, sa.false()).label("parked"),
        _token_kept.label("token"),
    )
    .outerjoin(leases, _of_lease)
    .outerjoin(drained, _of_drained)
    .where(
        partitions.c.subject_id == _subject.scalar_subquery(),
        partitions.c.state != PartitionState.PLANNED,
    )
)
_any_left = (
    sa.select(drained.c.partition_id)
    .join(partitions, partitions.c.partition_id == drained.c.partition_id)
    .where(
        drained.c.group_id == sa.bindparam("of_group"),
        drained.c.parked,
        partitions.c.state != PartitionState.EXPIRED,
    )
    .limit(1)
)


def read_taken_over(
    connection: Connection, group_id: int, held: Collection[Partition]
) -> dict[PartitionId, list[TakenOver]]:
    """Return granted partition id → the ancestors from which it adopts parked messages, the parents
    first.
    """
    parents = {parent for partition in held for parent in partition.parents}
    if not parents:
        return {}
    rows = connection.execute(_left, {"of_group": group_id, "parents": sorted(parents)}).all()
    tokens = {row.partition_id: row.token for row in rows}
    left = {row.partition_id for row in rows if row.parked}
    if not left:
        return {}
    kept = {row.partition_id: row.token_kept for row in rows}
    # A partition is usually granted later than all its ancestors, and nothing more has to be read.
    if any(_may_reach_past_parents(partition, left, kept) for partition in held):
        known = _read_known(connection, group_id)
        sources = {partition.partition_id: taken_over(partition, known) for partition in held}
    else:
        sources = {
            partition.partition_id: {parent: () for parent in partition.parents if parent in left}
            for partition in held
        }
    ids = sorted({number for each in sources.values() for number in each})
    read = {each.partition_id: each for each in read_partitions(connection, BY_ID, ids=ids)}
    return {
        key: [
            TakenOver(read[PartitionId(number)], tokens[number], ranges)
            for number, ranges in each.items()
            if number in read
        ]
        for key, each in sources.items()
    }


def _may_reach_past_parents(
    partition: Partition, left: Collection[int], tokens: Mapping[int, int]
) -> bool:
    """Return whether an ancestor that left messages may have a later lease than a parent; it may
    turn out to be an ancestor of other partitions.
    """
    if not partition.parents:
        return False
    least = min(tokens.get(parent, 0) for parent in partition.parents)
    highest = max(partition.parents)
    return any(
        tokens[each] > least and each < highest and each not in partition.parents for each in left
    )


def need_no_owner(
    connection: Connection, group_id: int, at_end: Sequence[int], parked: Collection[int]
) -> Sequence[int]:
    """Return `noted_at_end` for a locked group."""
    if not at_end:
        return at_end
    if not parked and connection.execute(_any_left, {"of_group": group_id}).first() is None:
        return at_end
    chosen = read_partitions(connection, BY_ID, ids=list(at_end))
    return noted_at_end(chosen, _read_known(connection, group_id), parked)


def _read_known(connection: Connection, group_id: int) -> dict[PartitionId, Ancestor]:
    here = {"of_group": group_id}
    rows = connection.execute(_known, here).all()
    subject_id = connection.execute(_subject, here).scalar_one()
    parents = subject_parents(connection, subject_id)
    return {
        PartitionId(row.partition_id): Ancestor(
            range_start=row.range_start,
            range_end=row.range_end,
            parents=parents.get(row.partition_id, ()),
            token=row.token,
            passed=row.drained or row.lost,
            left=bool(row.parked) and row.state != PartitionState.EXPIRED,
        )
        for row in rows
    }
