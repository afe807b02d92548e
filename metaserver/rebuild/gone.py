"""What a rebuild does without: partitions that only a broker group had which exists no more.  Pure.

    what is left ─▶ a child names a parent that nobody has ─▶ a lost row for it, with who may have lost messages

Invariants
    Nothing that has messages left lies before such a partition: it would be read beside what comes after.  In a static
    subject it may, because a queue is one chain: what is lost continues the partition before it in its queue.
    A group counts as through with it only if a consumer of the group was granted something behind it.
    What a group may have left unread there is given up only on the operator's word.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import msgspec

from ...protocol.control import PartitionStatus
from ...protocol.ids import PartitionId
from ...protocol.routing import Partition, PartitionState
from .rows import GonePartition, RebuiltPartition, RebuiltSubject, Word


def fill_gone(
    subject: RebuiltSubject,
    found: Sequence[PartitionStatus],
    rows: Mapping[int, RebuiltPartition],
    word: Word,
) -> Iterator[str]:
    """
    Give a subject rows for the parents that nobody has.

    Args:
        rows: those of the brokers' partitions, in the states that they have after the rebuild.

    Yields:
        Why that cannot be.
    """
    children: dict[int, list[Partition]] = {}
    for _, row in sorted(rows.items()):
        for parent in row.partition.parents:
            children.setdefault(parent, []).append(row.partition)
    missing = sorted(set(children) - set(rows))
    if not missing:
        return
    if not subject.static:
        yield from _left_before(found, rows, children)
    passed = _passed(found, rows)
    for number in missing:
        unread = tuple(
            one.name for one in subject.groups if number not in passed.get(one.name, set())
        )
        if unread and not word.lose_unread:
            yield (
                f"partition {number} is gone, and {', '.join(unread)} may have messages unread there: "
                "name its broker, or give them up with --lose-unread"
            )
        gone = _row(number, children[number], word.gone[0], subject.name)
        if subject.static:
            gone = msgspec.structs.replace(gone, parents=_before_in_queue(gone, subject))
        subject.gone.append(GonePartition(partition=gone, unread_by=unread))
        subject.partitions.append(RebuiltPartition(partition=gone, abandoned=True, lost=True))
    subject.partitions_named = max(subject.partitions_named, len(subject.partitions))


def _row(number: int, children: Sequence[Partition], broker_group: str, subject: str) -> Partition:
    """Where it was, by its children; of several groups that are gone the first stands for all."""
    return msgspec.structs.replace(
        children[0],
        partition_id=PartitionId(number),
        name=f"{subject}.gone-{number}",
        range_start=min(one.range_start for one in children),
        range_end=max(one.range_end for one in children),
        broker_group=broker_group,
        state=PartitionState.EXPIRED,
        parents=(),
    )


def _before_in_queue(gone: Partition, subject: RebuiltSubject) -> tuple[PartitionId, ...]:
    """The partition before a lost one in its queue: the latest of those that were sealed or are gone too."""
    before = [
        row.partition.partition_id
        for row in subject.partitions
        if row.partition.queue == gone.queue
        and row.partition.partition_id < gone.partition_id
        and (row.lost or row.partition.state is PartitionState.SEALED)
    ]
    return (max(before),) if before else ()


def _left_before(
    found: Sequence[PartitionStatus],
    rows: Mapping[int, RebuiltPartition],
    children: Mapping[int, Sequence[Partition]],
) -> Iterator[str]:
    """Sealed partitions whose continuation is gone, and all before them, have nothing left."""
    kept = {one.partition_id for one in found if one.first_offset < one.next_offset}
    told: set[int] = set()
    for number, row in sorted(rows.items()):
        one = row.partition
        covered = sum(
            min(one.range_end, child.range_end) - max(one.range_start, child.range_start)
            for child in children.get(number, ())
            if child.state is not PartitionState.EXPIRED
        )
        sealed = one.state is PartitionState.SEALED
        if not sealed or covered >= one.range_end - one.range_start:
            continue
        before = ({number} | _ancestors(number, rows)) & kept
        for each in sorted(before - told):
            yield (
                f"partition {each} has messages left, and something between it and those of today "
                "is gone: name its broker, or wait until retention has removed them"
            )
        told |= before


def _passed(
    found: Sequence[PartitionStatus], rows: Mapping[int, RebuiltPartition]
) -> dict[str, set[int]]:
    """Group → all that is before what one of its consumers was granted."""
    passed: dict[str, set[int]] = {}
    for one in found:
        for at_broker in one.groups:
            if at_broker.token and not at_broker.by_operator:
                before = _ancestors(one.partition_id, rows)
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
