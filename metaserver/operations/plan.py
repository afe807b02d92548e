"""Plans of operations: which partitions are sealed and which are opened.  Pure.

    resize     The subject gets the exact split of the wanted count.  A partition with a range of that split stays.
    split      One partition becomes two.
    merge      Neighbouring partitions become one.
    move       A partition continues with the same range on another broker group.
    evacuate   Every open partition of a broker group moves to other broker groups.
    set        Every open partition continues with the same range, under other settings of its subject.

Invariants
    The open partitions after a plan cover every logical partition exactly once.
    The parents of a child are exactly the sealed partitions whose ranges overlap the child's range.
    No plan but that of `set` seals a partition whose range and broker group stay the same.
    A child goes to the broker group with the fewest partitions of the subject.  Of several, to one that has a parent of the
    child; then to the one with the fewest partitions of all subjects.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from ...protocol.errors import InvalidRequestError, NotEnoughBrokersError, PartitionUnknownError
from ...protocol.ids import BrokerGroup, PartitionId, QueueNumber
from ...protocol.routing import split_ranges
from ...protocol.text import listed


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
    """A partition that is to be opened."""

    range_start: int
    range_end: int
    broker_group: BrokerGroup
    parents: tuple[PartitionId, ...]
    queue: QueueNumber | None = None
    """The parent's queue, if the child alone continues the parent; None: a new queue."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The partitions to seal and to open; empty if there is nothing to do."""

    sealed: tuple[PartitionId, ...] = ()
    """The partitions to seal, and sealed partitions that are abandoned now."""
    children: tuple[Child, ...] = ()


NOTHING = Plan()
Hosts = Mapping[BrokerGroup, int]
"""Broker group that takes new partitions → number of its open partitions, of all subjects."""


def plan_resize(current: Sequence[OpenPartition], count: int, hosts: Hosts) -> Plan:
    """
    Plan `count` partitions of ranges that differ by at most one logical partition.

    Raises:
        InvalidRequestError: `count` is outside 1..1024.
        NotEnoughBrokersError: `hosts` is empty.
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


def plan_split(current: Sequence[OpenPartition], partition_id: int, hosts: Hosts) -> Plan:
    """
    Cut a partition in the middle of its range.

    Raises:
        PartitionUnknownError: the subject has no such open partition.
        InvalidRequestError: the range is one logical partition.
        NotEnoughBrokersError: `hosts` is empty.
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
    Continue neighbouring partitions by one child.

    Raises:
        PartitionUnknownError: not all are open partitions of the subject.
        InvalidRequestError: fewer than two partitions, or a gap between their ranges.
        NotEnoughBrokersError: `hosts` is empty.
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
    Continue partitions on the broker group `target`.  Partitions that are on it already stay.

    Raises:
        PartitionUnknownError: not all are open partitions of the subject.
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
        NotEnoughBrokersError: no other broker group takes new partitions.
    """
    others = {group: load for group, load in hosts.items() if group != source}
    return _moves(
        current, [partition for partition in current if partition.broker_group == source], others
    )


def plan_set(current: Sequence[OpenPartition], hosts: Hosts) -> Plan:
    """
    Continue every open partition: its broker keeps the settings under which it was hosted.

    Raises:
        NotEnoughBrokersError: `hosts` is empty.
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
        f"partition {partition_id} is not an open partition of this subject; those that are: "
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
        raise NotEnoughBrokersError
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
