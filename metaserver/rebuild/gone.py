"""Infers the rows of gone partitions, whose only broker group is gone for good. Pure.

    a hosted child names a parent that no broker has
        ─▶ a lost row for the parent, with the groups that may lose messages

Invariants
    No ancestor of a gone partition has messages left, because they could be read after messages of
    the gone partition's children. A static subject is an exception: no partition of it has two
    parents, so that the gone partition becomes the child of the previous one.
    A group counts as having drained a gone partition only if a descendant of the partition was
    granted to the group.
    Messages of a gone partition that a group may not have read are given up only if the operator
    asks for it (`lose_unread`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import msgspec

from ...protocol.control import PartitionStatus
from ...protocol.ids import PartitionId
from ...protocol.routing import Partition, PartitionState
from .rows import GonePartition, RebuildOptions, RebuiltPartition, RebuiltSubject


def fill_gone(
    subject: RebuiltSubject,
    statuses: Sequence[PartitionStatus],
    rows: Mapping[int, RebuiltPartition],
    options: RebuildOptions,
) -> Iterator[str]:
    """
    Add a row to the subject for each parent that no broker has.

    Args:
        rows: partition id → row of each partition that a broker has, in its state after the
            rebuild.

    Yields:
        A problem for each reason to refuse the rebuild.
    """
    children: dict[int, list[Partition]] = {}
    for _, row in sorted(rows.items()):
        for parent in row.partition.parents:
            children.setdefault(parent, []).append(row.partition)
    missing = sorted(set(children) - set(rows))
    if not missing:
        return
    if not subject.static:
        yield from _left_before(statuses, rows, children)
    passed = _passed(statuses, rows)
    for number in missing:
        unread = tuple(
            group.name for group in subject.groups if number not in passed.get(group.name, set())
        )
        if unread and not options.lose_unread:
            yield (
                f"partition {number} is gone, and {', '.join(unread)} may have unread messages "
                "there: name its broker, or give up the messages with --lose-unread"
            )
        gone = _row(number, children[number], options.gone[0], subject.name)
        if subject.static:
            gone = msgspec.structs.replace(gone, parents=_before(gone, subject))
        subject.gone.append(GonePartition(partition=gone, unread_by=unread))
        subject.partitions.append(RebuiltPartition(partition=gone, abandoned=True, lost=True))
    subject.partitions_named = max(subject.partitions_named, len(subject.partitions))


def _row(number: int, children: Sequence[Partition], broker_group: str, subject: str) -> Partition:
    """Infer the row of a gone partition from its children; `broker_group` is a guess if several
    groups are gone.
    """
    return msgspec.structs.replace(
        children[0],
        partition_id=PartitionId(number),
        name=f"{subject}.gone-{number}",
        range_start=min(child.range_start for child in children),
        range_end=max(child.range_end for child in children),
        broker_group=broker_group,
        state=PartitionState.EXPIRED,
        parents=(),
    )


def _before(gone: Partition, subject: RebuiltSubject) -> tuple[PartitionId, ...]:
    """Return the partition before a gone one: the latest of the older ones that have its range and
    are sealed or gone too.
    """
    before = [
        row.partition.partition_id
        for row in subject.partitions
        if row.partition.range_start <= gone.range_start
        and row.partition.range_end >= gone.range_end
        and row.partition.partition_id < gone.partition_id
        and (row.lost or row.partition.state is PartitionState.SEALED)
    ]
    return (max(before),) if before else ()


def _left_before(
    statuses: Sequence[PartitionStatus],
    rows: Mapping[int, RebuiltPartition],
    children: Mapping[int, Sequence[Partition]],
) -> Iterator[str]:
    """
    Yield a problem for each ancestor of a gone partition that still has messages.

    An ancestor that shares no key with the gone partition is not a problem, because its messages
    are read before all others of its keys.
    """
    kept = {status.partition_id for status in statuses if status.first_offset < status.next_offset}
    named: set[int] = set()
    for number, row in sorted(rows.items()):
        partition = row.partition
        gone = _not_continued(partition, children.get(number, ()))
        if partition.state is not PartitionState.SEALED or not gone:
            continue
        before = {
            each
            for each in ({number} | _ancestors(number, rows)) & kept
            if any(_has(rows[each].partition, *part) for part in gone)
        }
        for ancestor in sorted(before - named):
            yield (
                f"partition {ancestor} has messages left, and a partition that continued it is "
                "gone: name the broker of the gone one, or wait until retention has removed "
                "the messages"
            )
        named |= before


def _not_continued(partition: Partition, children: Sequence[Partition]) -> list[tuple[int, int]]:
    """Return the parts of a partition's range that none of these children continues."""
    parts, start = [], partition.range_start
    alive = [child for child in children if child.state is not PartitionState.EXPIRED]
    for child in sorted(alive, key=lambda each: each.range_start):
        if child.range_start > start:
            parts.append((start, min(child.range_start, partition.range_end)))
        start = max(start, child.range_end)
    if start < partition.range_end:
        parts.append((start, partition.range_end))
    return parts


def _has(partition: Partition, start: int, end: int) -> bool:
    """Return whether the partition has some of these logical partitions."""
    return partition.range_start < end and start < partition.range_end


def _passed(
    statuses: Sequence[PartitionStatus], rows: Mapping[int, RebuiltPartition]
) -> dict[str, set[int]]:
    """Return consumer group → ids of the ancestors of all partitions that were granted to the
    group.
    """
    passed: dict[str, set[int]] = {}
    for status in statuses:
        for at_broker in status.groups:
            if at_broker.token and not at_broker.by_operator:
                before = _ancestors(status.partition_id, rows)
                passed.setdefault(at_broker.group, set()).update(before)
    return passed


def _ancestors(number: int, rows: Mapping[int, RebuiltPartition]) -> set[int]:
    above: set[int] = set()
    todo = [number]
    while todo:
        row = rows.get(todo.pop())
        for parent in () if row is None else row.partition.parents:
            if parent not in above:
                above.add(parent)
                todo.append(parent)
    return above
