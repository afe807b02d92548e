"""Plans operations: which partitions are sealed and which are opened. Pure.

    resize     The subject is repartitioned into `count` equal ranges. A partition that already
               has one of these ranges stays.
    grow       Logic queues of a static subject are cut in the middle. The first half continues its
               queue, the second half begins a new one.
    split      One partition becomes two.
    merge      Neighbouring partitions become one.
    move       A partition continues with the same range on another broker group.
    evacuate   Every open partition of a broker group moves to other broker groups.
    set        Every open partition continues with the same range, under other settings of its
               subject.

Invariants
    The open partitions after a plan cover every logical partition exactly once.
    The parents of a child are exactly the sealed partitions whose ranges overlap the child's range.
    Only the plan of `set` seals a partition whose range and broker group stay the same.
    A child continues its parent's queue exactly if its range begins where the range of its only
    parent begins. New queues of a static subject have the numbers that follow the highest one.
    A child goes to the broker group with the fewest partitions of the subject. Ties go to a group
    that has a parent of the child, then to the group with the fewest partitions of all subjects.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from ...protocol.errors import (
    InvalidRequestError,
    NotFoundError,
    PartitionUnknownError,
    Reason,
    UnavailableError,
)
from ...protocol.ids import BrokerGroup, PartitionId, QueueNumber
from ...protocol.limits import PARTITIONS_MAX
from ...protocol.routing import split_ranges
from ...protocol.text import counted, listed


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenPartition:
    """An open partition of the subject."""

    partition_id: PartitionId
    range_start: int
    range_end: int
    broker_group: BrokerGroup
    queue: QueueNumber


@dataclass(frozen=True, slots=True, kw_only=True)
class Child:
    """A partition that will be opened."""

    range_start: int
    range_end: int
    broker_group: BrokerGroup
    parents: tuple[PartitionId, ...]
    queue: QueueNumber | None = None
    """Number of the logic queue; None, in a subject that is not static: the number in the child's
    name.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The partitions to seal and to open; empty if there is nothing to do."""

    sealed: tuple[PartitionId, ...] = ()
    """Partitions to seal, and sealed partitions that are abandoned now."""
    children: tuple[Child, ...] = ()


NOTHING = Plan()
Hosts = Mapping[BrokerGroup, int]
"""Broker group that can host new partitions → number of its open partitions, of all subjects."""


def plan_resize(current: Sequence[OpenPartition], count: int, hosts: Hosts) -> Plan:
    """
    Plan `count` partitions whose ranges differ in size by at most one logical partition.

    Raises:
        InvalidRequestError: `count` is outside 1..1024.
        UnavailableError: `hosts` is empty.
    """
    wanted = split_ranges(count)
    here = {(partition.range_start, partition.range_end) for partition in current}
    new = [bounds for bounds in wanted if bounds not in here]
    kept = set(wanted)
    sealed = [
        partition
        for partition in current
        if (partition.range_start, partition.range_end) not in kept
    ]
    return _plan(current, sealed, new, hosts)


def plan_growth(
    subject: str,
    current: Sequence[OpenPartition],
    hosts: Hosts,
    *,
    count: int = 0,
    queues: Collection[int] = (),
) -> Plan:
    """
    Cut logic queues in the middle of their ranges.

    Every cut makes one queue, with the next number. Growing to a count gives the same queues at
    once as in steps.

    Args:
        current: the open partitions of a static subject, one for each queue.
        count: the wanted number of queues; the widest queue is cut next, among equals the first by
            range.
        queues: instead of `count`: the numbers of the queues to cut.

    Raises:
        InvalidRequestError: both or neither of `count` and `queues` are given; the count is lower
            than now, or above 1024; or a queue to cut is one logical partition.
        NotFoundError: the subject has no such queue.
        UnavailableError: `hosts` is empty.
    """
    if bool(count) == bool(queues):
        raise InvalidRequestError("give either the number of queues or the queues to split")
    ranges = {
        int(partition.queue): (partition.range_start, partition.range_end) for partition in current
    }
    if queues:
        for queue in sorted(set(queues)):
            _cut(subject, ranges, queue)
    else:
        if not len(ranges) <= count <= PARTITIONS_MAX:
            raise InvalidRequestError(
                f"subject {subject!r} has {counted(len(ranges), 'queue')}, and can grow to "
                f"{PARTITIONS_MAX}, "
                f"not to {count}",
                subject=subject,
                queues=len(ranges),
            )
        while len(ranges) < count:
            _cut(subject, ranges, min(ranges, key=lambda queue: _by_width(ranges[queue])))
    numbers = {bounds: QueueNumber(queue) for queue, bounds in ranges.items()}
    kept = {(partition.range_start, partition.range_end) for partition in current} & set(numbers)
    sealed = [each for each in current if (each.range_start, each.range_end) not in kept]
    plan = _plan(current, sealed, sorted(set(numbers) - kept), hosts)
    children = (
        replace(child, queue=numbers[child.range_start, child.range_end]) for child in plan.children
    )
    return replace(plan, children=tuple(children))


def _cut(subject: str, ranges: dict[int, tuple[int, int]], queue: int) -> None:
    """Leave the first half of a queue's range to the queue, and give the second half to a new
    queue.
    """
    if queue not in ranges:
        raise NotFoundError(
            Reason.QUEUE_UNKNOWN,
            f"subject {subject!r} has queues 0 to {max(ranges)}, not {queue}",
            subject=subject,
            queue=queue,
        )
    start, end = ranges[queue]
    middle = (start + end) // 2
    if middle == start:
        raise InvalidRequestError(
            f"queue {queue} is one logical partition and cannot be split", queue=queue
        )
    ranges[queue] = (start, middle)
    ranges[max(ranges) + 1] = (middle, end)


def _by_width(bounds: tuple[int, int]) -> tuple[int, int]:
    """Sort key: the widest range first, among equals the first."""
    start, end = bounds
    return start - end, start


def plan_split(current: Sequence[OpenPartition], partition_id: int, hosts: Hosts) -> Plan:
    """
    Cut a partition in the middle of its range.

    Raises:
        PartitionUnknownError: the subject has no such open partition.
        InvalidRequestError: the range is one logical partition.
        UnavailableError: `hosts` is empty.
    """
    partition = _find(current, partition_id)
    middle = (partition.range_start + partition.range_end) // 2
    if middle == partition.range_start:
        raise InvalidRequestError(
            f"partition {partition_id} is one logical partition and cannot be split",
            partition_id=partition_id,
        )
    halves = [(partition.range_start, middle), (middle, partition.range_end)]
    return _plan(current, [partition], halves, hosts)


def plan_merge(current: Sequence[OpenPartition], ids: Collection[int], hosts: Hosts) -> Plan:
    """
    Continue neighbouring partitions with one child.

    Raises:
        PartitionUnknownError: an id is not that of an open partition of the subject.
        InvalidRequestError: there are fewer than two partitions, or there is a gap between their
            ranges.
        UnavailableError: `hosts` is empty.
    """
    merged = sorted(
        (_find(current, partition_id) for partition_id in set(ids)),
        key=lambda partition: partition.range_start,
    )
    if len(merged) < 2:
        raise InvalidRequestError("a merge takes two partitions or more")
    for left, right in pairwise(merged):
        if left.range_end != right.range_start:
            raise InvalidRequestError(
                f"partitions {left.partition_id} and {right.partition_id} are not neighbours: "
                f"[{left.range_start}, {left.range_end}) and "
                f"[{right.range_start}, {right.range_end})"
            )
    return _plan(current, merged, [(merged[0].range_start, merged[-1].range_end)], hosts)


def plan_move(current: Sequence[OpenPartition], ids: Collection[int], target: BrokerGroup) -> Plan:
    """
    Continue partitions on the broker group `target`, except those that are on it already.

    Raises:
        PartitionUnknownError: an id is not that of an open partition of the subject.
        InvalidRequestError: `ids` is empty.
    """
    if not ids:
        raise InvalidRequestError("a move takes one partition or more")
    asked = [_find(current, partition_id) for partition_id in set(ids)]
    return _moves(
        current, [partition for partition in asked if partition.broker_group != target], {target: 0}
    )


def plan_evacuation(current: Sequence[OpenPartition], source: BrokerGroup, hosts: Hosts) -> Plan:
    """
    Continue every open partition of the broker group `source` on other broker groups.

    Raises:
        UnavailableError: no other broker group can host new partitions.
    """
    others = {group: load for group, load in hosts.items() if group != source}
    return _moves(
        current, [partition for partition in current if partition.broker_group == source], others
    )


def plan_set(current: Sequence[OpenPartition], hosts: Hosts) -> Plan:
    """
    Continue every open partition, because a broker never changes the settings of a hosted
    partition.

    Raises:
        UnavailableError: `hosts` is empty.
    """
    return _moves(current, list(current), hosts)


def _moves(current: Sequence[OpenPartition], leaving: list[OpenPartition], hosts: Hosts) -> Plan:
    leaving.sort(key=lambda partition: partition.range_start)
    ranges = [(partition.range_start, partition.range_end) for partition in leaving]
    return _plan(current, leaving, ranges, hosts)


def _find(current: Sequence[OpenPartition], partition_id: int) -> OpenPartition:
    for partition in current:
        if partition.partition_id == partition_id:
            return partition
    raise PartitionUnknownError(
        f"partition {partition_id} is not an open partition of this subject; its open partitions: "
        f"{listed(sorted(partition.partition_id for partition in current))}",
        partition_id=partition_id,
    )


def _plan(
    current: Sequence[OpenPartition],
    sealed: Collection[OpenPartition],
    ranges: Sequence[tuple[int, int]],
    hosts: Hosts,
) -> Plan:
    if not ranges:
        return NOTHING
    if not hosts:
        raise UnavailableError(Reason.NOT_ENOUGH_BROKERS)
    gone = {partition.partition_id for partition in sealed}
    of_subject = Counter(
        partition.broker_group for partition in current if partition.partition_id not in gone
    )
    load = Counter(hosts)
    children = []
    for start, end in ranges:
        parents = [
            partition
            for partition in sealed
            if partition.range_start < end and start < partition.range_end
        ]
        homes = {parent.broker_group for parent in parents}
        group = min(
            hosts,
            key=lambda host: (of_subject[host], host not in homes, load[host], host),
        )
        of_subject[group] += 1
        load[group] += 1
        alone = len(parents) == 1 and (parents[0].range_start, parents[0].range_end) == (start, end)
        children.append(
            Child(
                range_start=start,
                range_end=end,
                broker_group=group,
                parents=tuple(sorted(parent.partition_id for parent in parents)),
                queue=parents[0].queue if alone else None,
            )
        )
    return Plan(sealed=tuple(sorted(gone)), children=tuple(children))
