"""Finds the ancestors whose parked messages a granted partition adopts. Runs SQL synchronously.

Messages that a group has parked on a drained partition are adopted by the owner of a descendant:

    parked on a parent
        ─▶ always adopted; messages that were adopted earlier are not requested again
    parked on a further ancestor that was reset alone, after the partitions in between were last
    granted
        ─▶ adopted directly, skipping the partitions in between
    parked on a further ancestor, and all partitions in between are lost, along with the messages
    that their owners had adopted
        ─▶ adopted directly, skipping the partitions in between

Invariant
    Messages that an owner of a partition in between could adopt are adopted only through that
    partition. If that partition is lost, the messages that the ancestor still has are handled,
    possibly for a second time.
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


class AdoptedAncestor(NamedTuple):
    """An ancestor from which a partition adopts parked messages."""

    partition: Partition
    token: int
    """Token of the group's last lease of the ancestor."""
    ranges: Ranges
    """Ranges to adopt; if empty, the whole range of the adopting partition."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ancestor:
    """A partition as a possible ancestor, from the point of view of one group."""

    range_start: int
    range_end: int
    parents: tuple[PartitionId, ...] = ()
    token: int = 0
    """Token of the last lease; 0 if there was none, or if the partition was lost together with
    unfinished work of its owners.
    """
    is_finished: bool = False
    """True if the group may read its children, either because it is drained or because its loss was
    accepted.
    """
    has_parked: bool = False
    """True if the group has drained it but still has parked messages there."""


def adopted_ranges(
    partition: Partition, ancestors: Mapping[PartitionId, Ancestor]
) -> dict[int, Ranges]:
    """
    Return a dict that maps each ancestor id to the ranges of parked messages that a partition
    adopts, as in `AdoptedAncestor`.

    An ancestor other than a parent counts if its last lease is newer than those of all partitions
    in between, because none of them was then granted after messages were parked there.
    """
    parents = [parent for parent in partition.parents if parent in ancestors]
    parent_ranges: dict[int, Ranges] = {
        parent: () for parent in parents if ancestors[parent].has_parked
    }
    latest_token = max(
        (ancestor.token for ancestor in ancestors.values() if ancestor.has_parked), default=0
    )
    pending_visits = [
        (parent, *_overlap(partition, ancestors[parent]), ancestors[parent].token)
        for parent in parents
        if ancestors[parent].is_finished
    ]
    visited = set(pending_visits)
    ancestor_ranges: dict[int, set[tuple[int, int]]] = {}
    while pending_visits:
        descendant_id, start, end, newest_token = pending_visits.pop()
        if newest_token >= latest_token:
            continue
        for ancestor_id in ancestors[descendant_id].parents:
            ancestor = ancestors.get(ancestor_id)
            if ancestor is None:
                continue
            overlap = max(start, ancestor.range_start), min(end, ancestor.range_end)
            if overlap[0] >= overlap[1]:
                continue  # an empty range would be merged to (), which means the whole range
            if (
                ancestor.has_parked
                and ancestor.token > newest_token
                and ancestor_id not in parent_ranges
            ):
                ancestor_ranges.setdefault(ancestor_id, set()).add(overlap)
            visit = (ancestor_id, *overlap, max(newest_token, ancestor.token))
            if ancestor.is_finished and visit not in visited:
                visited.add(visit)
                pending_visits.append(visit)
    return parent_ranges | {
        ancestor_id: _merge_ranges(ranges) for ancestor_id, ranges in ancestor_ranges.items()
    }


def find_finished_partitions(
    partitions_at_end: Iterable[Partition],
    ancestors: Mapping[PartitionId, Ancestor],
    parked_ids: Collection[int],
) -> list[int]:
    """
    Return the ids, in ascending order, of those partitions in `partitions_at_end` that the group
    has finished.

    The others, and their children, still need an owner that adopts parked messages of ancestors.

    Args:
        partitions_at_end: sealed partitions that the group has fully acked; each of their parents
            is drained or one of them.
        parked_ids: ids of those on which the group has parked messages.
    """
    updated_ancestors = dict(ancestors)
    finished_ids: list[int] = []
    waiting_ids: set[int] = set()
    for partition in sorted(partitions_at_end, key=lambda candidate: candidate.partition_id):
        partition_id = partition.partition_id
        if adopted_ranges(partition, updated_ancestors) or not waiting_ids.isdisjoint(
            partition.parents
        ):
            waiting_ids.add(partition_id)
            continue
        finished_ids.append(partition_id)
        if partition_id in updated_ancestors:
            updated_ancestors[partition_id] = replace(
                updated_ancestors[partition_id],
                is_finished=True,
                has_parked=partition_id in parked_ids,
            )
    return finished_ids


def _overlap(partition: Partition, ancestor: Ancestor) -> tuple[int, int]:
    """Return the intersection of the two ranges; its end is not above its start if it is empty."""
    start = max(partition.range_start, ancestor.range_start)
    return start, min(partition.range_end, ancestor.range_end)


def _merge_ranges(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """Merge overlapping and adjacent ranges. Empty ranges are dropped."""
    merged_ranges: list[tuple[int, int]] = []
    for start, end in sorted(bounds for bounds in ranges if bounds[0] < bounds[1]):
        if merged_ranges and start <= merged_ranges[-1][1]:
            merged_ranges[-1] = merged_ranges[-1][0], max(end, merged_ranges[-1][1])
        else:
            merged_ranges.append((start, end))
    return tuple(merged_ranges)


# ── SQL ───────────────────────────────────────────────────────────────────────────────────────────
_lease_token = sa.func.coalesce(leases.c.token, 0)
_may_have_work = sa.or_(drained.c.partition_id.is_(None), drained.c.parked)
_surviving_token = sa.case((sa.and_(partitions.c.lost, _may_have_work), 0), else_=_lease_token)
"""Token of the last lease. It is 0 for a lost partition, unless it was drained without parked
messages, so that its work is known to be complete.
"""
_lease_join = sa.and_(
    leases.c.group_id == sa.bindparam("of_group"),
    leases.c.partition_id == partitions.c.partition_id,
)
_drained_join = sa.and_(
    drained.c.group_id == sa.bindparam("of_group"),
    drained.c.partition_id == partitions.c.partition_id,
)
_parked_query = (
    sa.select(
        drained.c.partition_id,
        drained.c.parked,
        _lease_token.label("token"),
        _surviving_token.label("surviving_token"),
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
_subject_of_group = sa.select(groups.c.subject_id).where(
    groups.c.group_id == sa.bindparam("of_group")
)
_ancestors_query = (
    sa.select(
        partitions.c.partition_id,
        partitions.c.range_start,
        partitions.c.range_end,
        partitions.c.state,
        partitions.c.lost,
        drained.c.partition_id.is_not(None).label("drained"),
        sa.func.coalesce(drained.c.parked, sa.false()).label("parked"),
        _surviving_token.label("token"),
    )
    .outerjoin(leases, _lease_join)
    .outerjoin(drained, _drained_join)
    .where(
        partitions.c.subject_id == _subject_of_group.scalar_subquery(),
        partitions.c.state != PartitionState.PLANNED,
    )
)
_any_parked_query = (
    sa.select(drained.c.partition_id)
    .join(partitions, partitions.c.partition_id == drained.c.partition_id)
    .where(
        drained.c.group_id == sa.bindparam("of_group"),
        drained.c.parked,
        partitions.c.state != PartitionState.EXPIRED,
    )
    .limit(1)
)


def read_adopted(
    connection: Connection, group_id: int, granted: Collection[Partition]
) -> dict[PartitionId, list[AdoptedAncestor]]:
    """Return a dict that maps each granted partition id to the ancestors whose parked messages it
    adopts, parents first.
    """
    parents = {parent for partition in granted for parent in partition.parents}
    if not parents:
        return {}
    rows = connection.execute(
        _parked_query, {"of_group": group_id, "parents": sorted(parents)}
    ).all()
    tokens = {row.partition_id: row.token for row in rows}
    parked_ids = {row.partition_id for row in rows if row.parked}
    if not parked_ids:
        return {}
    remaining_tokens = {row.partition_id: row.surviving_token for row in rows}
    # Usually a partition is granted after all of its ancestors, and nothing more needs to be read.
    if any(
        _may_reach_past_parents(partition, parked_ids, remaining_tokens) for partition in granted
    ):
        ancestors = _read_ancestors(connection, group_id)
        ranges_by_partition = {
            partition.partition_id: adopted_ranges(partition, ancestors) for partition in granted
        }
    else:
        ranges_by_partition = {
            partition.partition_id: {
                parent: () for parent in partition.parents if parent in parked_ids
            }
            for partition in granted
        }
    ids = sorted(
        {
            ancestor_id
            for ranges_by_id in ranges_by_partition.values()
            for ancestor_id in ranges_by_id
        }
    )
    by_id = {
        ancestor.partition_id: ancestor for ancestor in read_partitions(connection, BY_ID, ids=ids)
    }
    return {
        partition_id: [
            AdoptedAncestor(by_id[PartitionId(ancestor_id)], tokens[ancestor_id], ranges)
            for ancestor_id, ranges in ranges_by_id.items()
            if ancestor_id in by_id
        ]
        for partition_id, ranges_by_id in ranges_by_partition.items()
    }


def _may_reach_past_parents(
    partition: Partition, parked_ids: Collection[int], tokens: Mapping[int, int]
) -> bool:
    """Return True if any partition with parked messages that may be a more distant ancestor has a
    newer lease than a parent. This check is cheap, but may have false positives.
    """
    if not partition.parents:
        return False
    oldest_token = min(tokens.get(parent, 0) for parent in partition.parents)
    newest_parent = max(partition.parents)
    return any(
        tokens[ancestor_id] > oldest_token
        and ancestor_id < newest_parent
        and ancestor_id not in partition.parents
        for ancestor_id in parked_ids
    )


def read_finished_partitions(
    connection: Connection, group_id: int, at_end_ids: Sequence[int], parked_ids: Collection[int]
) -> Sequence[int]:
    """Read the state that `find_finished_partitions` needs for a locked group and return its
    result.
    """
    if not at_end_ids:
        return at_end_ids
    if (
        not parked_ids
        and connection.execute(_any_parked_query, {"of_group": group_id}).first() is None
    ):
        return at_end_ids
    candidates = read_partitions(connection, BY_ID, ids=list(at_end_ids))
    return find_finished_partitions(candidates, _read_ancestors(connection, group_id), parked_ids)


def _read_ancestors(connection: Connection, group_id: int) -> dict[PartitionId, Ancestor]:
    parameters = {"of_group": group_id}
    rows = connection.execute(_ancestors_query, parameters).all()
    subject_id = connection.execute(_subject_of_group, parameters).scalar_one()
    parents = subject_parents(connection, subject_id)
    return {
        PartitionId(row.partition_id): Ancestor(
            range_start=row.range_start,
            range_end=row.range_end,
            parents=parents.get(row.partition_id, ()),
            token=row.token,
            is_finished=row.drained or row.lost,
            has_parked=bool(row.parked) and row.state != PartitionState.EXPIRED,
        )
        for row in rows
    }
