"""Plans operations: which partitions are sealed and which are opened. Pure.

    resize     The subject is repartitioned into `count` equal ranges. A partition that already
               has one of these ranges is kept.
    grow       Logic queues of a static subject are split in the middle. The first half continues
               its queue, the second half begins a new one.
    split      One partition becomes two.
    merge      Adjacent partitions become one.
    move       A partition continues with the same range on another broker group.
    evacuate   Every open partition of a broker group moves to other broker groups.
    set        Every open partition continues with the same range, under other settings of its
               subject.

Invariants
    The open partitions after a plan cover every logical partition exactly once.
    The parents of a child are exactly those sealed partitions whose ranges overlap the range of the
    child.
    Only the plan of `set` seals a partition whose range and broker group stay the same.
    A child continues its parent's queue if and only if its range begins where the range of its only
    parent begins. New queues of a static subject get the next numbers.
    A child is placed on the broker group with the fewest partitions of the subject. Ties are broken
    in favor of a group that has a parent of the child, then of the group with the fewest partitions
    overall.
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
    """A partition to be opened."""

    range_start: int
    range_end: int
    broker_group: BrokerGroup
    parents: tuple[PartitionId, ...]
    queue: QueueNumber | None = None
    """Number of the logic queue. If it is None because the subject is not static, the number in the
    child's name is used.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The partitions to seal and to open; empty if there is nothing to do."""

    sealed: tuple[PartitionId, ...] = ()
    """Partitions to seal, and already sealed partitions to abandon."""
    children: tuple[Child, ...] = ()


EMPTY_PLAN = Plan()
Hosts = Mapping[BrokerGroup, int]
"""Maps each broker group that can host new partitions to its number of open partitions, of all
subjects.
"""


def plan_resize(current: Sequence[OpenPartition], count: int, hosts: Hosts) -> Plan:
    """
    Plan a change to `count` partitions whose ranges differ in size by at most one logical
    partition.

    Raises:
        InvalidRequestError: `count` is outside 1..1024.
        UnavailableError: `hosts` is empty.
    """
    target_ranges = split_ranges(count)
    current_ranges = {(partition.range_start, partition.range_end) for partition in current}
    new_ranges = [bounds for bounds in target_ranges if bounds not in current_ranges]
    kept_ranges = set(target_ranges)
    sealed_partitions = [
        partition
        for partition in current
        if (partition.range_start, partition.range_end) not in kept_ranges
    ]
    return _plan_children(current, sealed_partitions, new_ranges, hosts)


def plan_growth(
    subject: str,
    current: Sequence[OpenPartition],
    hosts: Hosts,
    *,
    count: int = 0,
    queues: Collection[int] = (),
) -> Plan:
    """
    Plan how to split logic queues in the middle of their ranges.

    Each split adds one queue, with the next number. Growing to a count in several steps has the
    same result as growing to it directly.

    Args:
        current: the open partitions of a static subject, one for each queue.
        count: the target number of queues. The queue with the widest range is always split next;
            ties go to the first one by range.
        queues: the numbers of the queues to split, instead of `count`.

    Raises:
        InvalidRequestError: both or neither of `count` and `queues` are given; the count is less
            than the current one or greater than 1024; or a queue to split has only one logical
            partition.
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
            _split_queue(subject, ranges, queue)
    else:
        if not len(ranges) <= count <= PARTITIONS_MAX:
            raise InvalidRequestError(
                f"subject {subject!r} has {counted(len(ranges), 'queue')}, and can grow to at most "
                f"{PARTITIONS_MAX}, "
                f"not to {count}",
                subject=subject,
                queues=len(ranges),
            )
        while len(ranges) < count:
            _split_queue(
                subject, ranges, min(ranges, key=lambda queue: _widest_first(ranges[queue]))
            )
    queue_of_range = {bounds: QueueNumber(queue) for queue, bounds in ranges.items()}
    kept_ranges = {(partition.range_start, partition.range_end) for partition in current} & set(
        queue_of_range
    )
    sealed_partitions = [
        partition
        for partition in current
        if (partition.range_start, partition.range_end) not in kept_ranges
    ]
    plan = _plan_children(
        current, sealed_partitions, sorted(set(queue_of_range) - kept_ranges), hosts
    )
    children = (
        replace(child, queue=queue_of_range[child.range_start, child.range_end])
        for child in plan.children
    )
    return replace(plan, children=tuple(children))


def _split_queue(subject: str, ranges: dict[int, tuple[int, int]], queue: int) -> None:
    """Split a queue's range in the middle. The queue keeps the first half, and a new queue gets the
    second half.
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


def _widest_first(bounds: tuple[int, int]) -> tuple[int, int]:
    """Return a sort key for ranges: the widest comes first, and ranges of equal width are sorted by
    position.
    """
    start, end = bounds
    return start - end, start


def plan_split(current: Sequence[OpenPartition], partition_id: int, hosts: Hosts) -> Plan:
    """
    Plan how to split a partition in the middle of its range.

    Raises:
        PartitionUnknownError: the subject has no such open partition.
        InvalidRequestError: the range has only one logical partition.
        UnavailableError: `hosts` is empty.
    """
    partition = _find_partition(current, partition_id)
    middle = (partition.range_start + partition.range_end) // 2
    if middle == partition.range_start:
        raise InvalidRequestError(
            f"partition {partition_id} is one logical partition and cannot be split",
            partition_id=partition_id,
        )
    halves = [(partition.range_start, middle), (middle, partition.range_end)]
    return _plan_children(current, [partition], halves, hosts)


def plan_merge(current: Sequence[OpenPartition], ids: Collection[int], hosts: Hosts) -> Plan:
    """
    Plan how to merge adjacent partitions into one child.

    Raises:
        PartitionUnknownError: one of the ids is not that of an open partition of the subject.
        InvalidRequestError: there are fewer than two partitions, or there is a gap between their
            ranges.
        UnavailableError: `hosts` is empty.
    """
    merged_partitions = sorted(
        (_find_partition(current, partition_id) for partition_id in set(ids)),
        key=lambda partition: partition.range_start,
    )
    if len(merged_partitions) < 2:
        raise InvalidRequestError("a merge takes two or more partitions")
    for left, right in pairwise(merged_partitions):
        if left.range_end != right.range_start:
            raise InvalidRequestError(
                f"partitions {left.partition_id} and {right.partition_id} are not adjacent: "
                f"[{left.range_start}, {left.range_end}) and "
                f"[{right.range_start}, {right.range_end})"
            )
    return _plan_children(
        current,
        merged_partitions,
        [(merged_partitions[0].range_start, merged_partitions[-1].range_end)],
        hosts,
    )


def plan_move(current: Sequence[OpenPartition], ids: Collection[int], target: BrokerGroup) -> Plan:
    """
    Plan how to move partitions to the broker group `target`, except those that are already there.

    Raises:
        PartitionUnknownError: one of the ids is not that of an open partition of the subject.
        InvalidRequestError: `ids` is empty.
    """
    if not ids:
        raise InvalidRequestError("a move takes one or more partitions")
    requested_ids = [_find_partition(current, partition_id) for partition_id in set(ids)]
    return _plan_same_ranges(
        current,
        [partition for partition in requested_ids if partition.broker_group != target],
        {target: 0},
    )


def plan_evacuation(current: Sequence[OpenPartition], source: BrokerGroup, hosts: Hosts) -> Plan:
    """
    Plan how to move all open partitions of the broker group `source` to other broker groups.

    Raises:
        UnavailableError: no other broker group can host new partitions.
    """
    other_loads = {group: load for group, load in hosts.items() if group != source}
    return _plan_same_ranges(
        current,
        [partition for partition in current if partition.broker_group == source],
        other_loads,
    )


def plan_settings_change(current: Sequence[OpenPartition], hosts: Hosts) -> Plan:
    """
    Plan a child for every open partition, because a broker never changes the settings of a hosted
    partition.

    Raises:
        UnavailableError: `hosts` is empty.
    """
    return _plan_same_ranges(current, list(current), hosts)


def _plan_same_ranges(
    current: Sequence[OpenPartition], moved_partitions: list[OpenPartition], hosts: Hosts
) -> Plan:
    """Plan a child with the same range for each partition in `moved_partitions`."""
    moved_partitions.sort(key=lambda partition: partition.range_start)
    ranges = [(partition.range_start, partition.range_end) for partition in moved_partitions]
    return _plan_children(current, moved_partitions, ranges, hosts)


def _find_partition(current: Sequence[OpenPartition], partition_id: int) -> OpenPartition:
    for partition in current:
        if partition.partition_id == partition_id:
            return partition
    raise PartitionUnknownError(
        f"partition {partition_id} is not an open partition of this subject; its open partitions: "
        f"{listed(sorted(partition.partition_id for partition in current))}",
        partition_id=partition_id,
    )


def _plan_children(
    current: Sequence[OpenPartition],
    sealed_partitions: Collection[OpenPartition],
    ranges: Sequence[tuple[int, int]],
    hosts: Hosts,
) -> Plan:
    """Plan a child for each range, placing each on the least loaded broker group."""
    if not ranges:
        return EMPTY_PLAN
    if not hosts:
        raise UnavailableError(Reason.NOT_ENOUGH_BROKERS)
    sealed_ids = {partition.partition_id for partition in sealed_partitions}
    subject_load = Counter(
        partition.broker_group for partition in current if partition.partition_id not in sealed_ids
    )
    load = Counter(hosts)
    children = []
    for start, end in ranges:
        parents = [
            partition
            for partition in sealed_partitions
            if partition.range_start < end and start < partition.range_end
        ]
        parent_groups = {parent.broker_group for parent in parents}
        broker_group = min(
            hosts,
            key=lambda host: (subject_load[host], host not in parent_groups, load[host], host),
        )
        subject_load[broker_group] += 1
        load[broker_group] += 1
        continues_parent = len(parents) == 1 and (parents[0].range_start, parents[0].range_end) == (
            start,
            end,
        )
        children.append(
            Child(
                range_start=start,
                range_end=end,
                broker_group=broker_group,
                parents=tuple(sorted(parent.partition_id for parent in parents)),
                queue=parents[0].queue if continues_parent else None,
            )
        )
    return Plan(sealed=tuple(sorted(sealed_ids)), children=tuple(children))
