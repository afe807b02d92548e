"""Infers the rows of gone partitions, whose broker groups no longer exist. Pure.

    a hosted child has a parent that no broker has
        ─▶ a lost row for the parent, with the groups that may lose messages

Invariants
    No ancestor of a gone partition may have messages left, because they could be read after
    messages of the gone partition's children. Static subjects are an exception: none of their
    partitions has two parents, so the gone partition becomes the child of the previous one.
    A group counts as having drained a gone partition only if it was granted one of its descendants.
    Messages of a gone partition that a group may not have read are given up only at the request of
    the operator (`lose_unread`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import msgspec

from ...protocol.control import PartitionStatus
from ...protocol.ids import PartitionId
from ...protocol.routing import Partition, PartitionState
from .rows import GonePartition, RebuildOptions, RebuiltPartition, RebuiltSubject


def add_gone_partitions(
    subject: RebuiltSubject,
    statuses: Sequence[PartitionStatus],
    rows: Mapping[int, RebuiltPartition],
    options: RebuildOptions,
) -> Iterator[str]:
    """
    Add a row to the subject for each parent that no broker has.

    Args:
        rows: maps the id of each partition that brokers have to its row, in its state after the
            rebuild.

    Yields:
        Each reason for refusing the rebuild.
    """
    children: dict[int, list[Partition]] = {}
    for _, row in sorted(rows.items()):
        for parent in row.partition.parents:
            children.setdefault(parent, []).append(row.partition)
    missing_ids = sorted(set(children) - set(rows))
    if not missing_ids:
        return
    if not subject.static:
        yield from _find_unread_ancestors(statuses, rows, children)
    read_ids = _find_read_ancestors(statuses, rows)
    for partition_id in missing_ids:
        unread_by = tuple(
            group.name
            for group in subject.groups
            if partition_id not in read_ids.get(group.name, ())
        )
        if unread_by and not options.lose_unread:
            yield (
                f"partition {partition_id} is gone, and {', '.join(unread_by)} may have unread "
                "messages there: name its broker, or give up the messages with --lose-unread"
            )
        gone_partition = _infer_gone(
            partition_id, children[partition_id], options.gone[0], subject.name
        )
        if subject.static:
            gone_partition = msgspec.structs.replace(
                gone_partition, parents=_infer_parents(gone_partition, subject)
            )
        subject.gone.append(GonePartition(partition=gone_partition, unread_by=unread_by))
        subject.partitions.append(
            RebuiltPartition(partition=gone_partition, abandoned=True, lost=True)
        )
    subject.partitions_named = max(subject.partitions_named, len(subject.partitions))


def _infer_gone(
    partition_id: int, children: Sequence[Partition], broker_group: str, subject: str
) -> Partition:
    """Infer a gone partition from its children. If several broker groups are gone, `broker_group`
    is only a guess.
    """
    return msgspec.structs.replace(
        children[0],
        partition_id=PartitionId(partition_id),
        name=f"{subject}.gone-{partition_id}",
        range_start=min(child.range_start for child in children),
        range_end=max(child.range_end for child in children),
        broker_group=broker_group,
        state=PartitionState.EXPIRED,
        parents=(),
    )


def _infer_parents(gone: Partition, subject: RebuiltSubject) -> tuple[PartitionId, ...]:
    """Return the parent, if any, of a static subject's gone partition: the newest older partition
    that has its range and is sealed or gone too.
    """
    candidates = [
        row.partition.partition_id
        for row in subject.partitions
        if row.partition.range_start <= gone.range_start
        and row.partition.range_end >= gone.range_end
        and row.partition.partition_id < gone.partition_id
        and (row.lost or row.partition.state is PartitionState.SEALED)
    ]
    return (max(candidates),) if candidates else ()


def _find_unread_ancestors(
    statuses: Sequence[PartitionStatus],
    rows: Mapping[int, RebuiltPartition],
    children: Mapping[int, Sequence[Partition]],
) -> Iterator[str]:
    """
    Yield a description of each ancestor of a gone partition that still has messages.

    An ancestor that has no keys in common with the gone partition is not a problem, because its
    messages are read before all other messages with its keys.
    """
    ids_with_messages = {
        status.partition_id for status in statuses if status.first_offset < status.next_offset
    }
    reported_ids: set[int] = set()
    for partition_id, row in sorted(rows.items()):
        partition = row.partition
        gone_ranges = _find_uncontinued_ranges(partition, children.get(partition_id, ()))
        if partition.state is not PartitionState.SEALED or not gone_ranges:
            continue
        unread_ids = {
            each
            for each in ({partition_id} | _find_ancestors(partition_id, rows)) & ids_with_messages
            if any(_overlaps(rows[each].partition, start, end) for start, end in gone_ranges)
        }
        for ancestor in sorted(unread_ids - reported_ids):
            yield (
                f"partition {ancestor} has messages left, and a partition that continued it is "
                "gone: name the broker of the gone one, or wait until retention has removed "
                "the messages"
            )
        reported_ids |= unread_ids


def _find_uncontinued_ranges(
    partition: Partition, children: Sequence[Partition]
) -> list[tuple[int, int]]:
    """Return those parts of a partition's range that none of these children continues."""
    ranges, start = [], partition.range_start
    live_children = [child for child in children if child.state is not PartitionState.EXPIRED]
    for child in sorted(live_children, key=lambda each: each.range_start):
        if child.range_start > start:
            ranges.append((start, min(child.range_start, partition.range_end)))
        start = max(start, child.range_end)
    if start < partition.range_end:
        ranges.append((start, partition.range_end))
    return ranges


def _overlaps(partition: Partition, start: int, end: int) -> bool:
    """Return True if the partition's range overlaps `[start, end)`."""
    return partition.range_start < end and start < partition.range_end


def _find_read_ancestors(
    statuses: Sequence[PartitionStatus], rows: Mapping[int, RebuiltPartition]
) -> dict[str, set[int]]:
    """Return a dict that maps each consumer group to the ids of the partitions that it must have
    fully read, because it was granted a descendant of each.
    """
    ancestors: dict[str, set[int]] = {}
    for status in statuses:
        for group_status in status.groups:
            if group_status.token and not group_status.by_operator:
                ancestor_ids = _find_ancestors(status.partition_id, rows)
                ancestors.setdefault(group_status.group, set()).update(ancestor_ids)
    return ancestors


def _find_ancestors(partition_id: int, rows: Mapping[int, RebuiltPartition]) -> set[int]:
    ancestors: set[int] = set()
    pending_ids = [partition_id]
    while pending_ids:
        row = rows.get(pending_ids.pop())
        for parent in () if row is None else row.partition.parents:
            if parent not in ancestors:
                ancestors.add(parent)
                pending_ids.append(parent)
    return ancestors
