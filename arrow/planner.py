"""Which offsets of which physical partitions are read: fixed once, from the route and the brokers' answers.  Pure.

    route: partitions that have data ──filter──▶ one PlannedRange each, half-open [start, end)
    status of each partition ──────────────────▶ first and next offset, as of planning

Invariants
    The ends are numbers by the time a reader exists: a retry, a second action and a second plan read the
    same rows, or fail with OffsetOutOfRangeError.
    A range that is asked for by number and is not there is refused, never cut to what is.

Source: Kafka's batch reader binds its end late in each task; a retry can then see another end.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from graphlib import TopologicalSorter

from ..protocol.control import PartitionStatus
from ..protocol.errors import NotSentError, OffsetOutOfRangeError, PartitionUnknownError
from ..protocol.routing import Partition, PartitionState, Route
from .schema import PARTITION_MAX
from .selection import Edge, Point, ReadOptions

_WITH_DATA = frozenset({PartitionState.OPEN, PartitionState.SEALED})


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedRange:
    """The offsets `[start, end)` of one physical partition, and the broker that had it at planning."""

    partition_id: int
    broker_group: str
    address: str
    start: int
    end: int
    subject: str
    queue: int
    logic_start: int
    """Logic offset of the partition's offset 0."""
    epoch: int
    """Depth in the lineage: 0 without parents, else one more than theirs, as far as the route knows them."""


def depths(route: Route) -> dict[int, int]:
    """Partition id → depth in the lineage: below every parent that the route knows."""
    parents = {each.partition_id: each.parents for each in route.partitions}
    depth: dict[int, int] = {}
    for partition_id in TopologicalSorter(parents).static_order():
        if partition_id in parents:
            known = [depth[parent] + 1 for parent in parents[partition_id] if parent in depth]
            depth[partition_id] = max(known, default=0)
    return depth


def select_partitions(route: Route, options: ReadOptions) -> list[Partition]:
    """
    The partitions to read, by id: those with data, or those named by the options.

    Raises:
        PartitionUnknownError: the options name a partition that the subject does not have, or whose data is gone.
        NotSentError: the broker group of a partition is not available.
    """
    stored = {
        partition.partition_id: partition
        for partition in route.partitions
        if partition.state in _WITH_DATA
    }
    named = set(options.partitions or ())
    for bound in (options.start, options.end):
        named |= bound.by_partition.keys()
    unknown = sorted(named - stored.keys())
    if unknown:
        raise PartitionUnknownError(
            f"subject {route.subject} has no data in partition {unknown[0]}",
            partition_id=unknown[0],
            subject=route.subject,
        )
    wanted = [
        partition
        for number, partition in sorted(stored.items())
        if options.partitions is None or number in options.partitions
    ]
    for partition in wanted:
        assert partition.partition_id <= PARTITION_MAX
        if partition.address is None:
            raise NotSentError(
                f"broker group {partition.broker_group} is not available",
                partition_id=partition.partition_id,
                broker_group=partition.broker_group,
            )
    return wanted


def plan_ranges(
    route: Route,
    partitions: list[Partition],
    statuses: Mapping[int, PartitionStatus],
    options: ReadOptions,
) -> list[PlannedRange]:
    """
    One range per partition, empty ones too, in the order of `partitions`.

    Args:
        partitions: as `select_partitions` gives them.
        statuses: partition id → status, from the brokers.

    Raises:
        PartitionUnknownError: no broker has the partition.
        OffsetOutOfRangeError: an offset of the options is not in its partition, or start is after end.
    """
    ranges = []
    epochs = depths(route)
    for partition in partitions:
        status = statuses.get(partition.partition_id)
        if status is None:
            raise PartitionUnknownError(
                partition_id=partition.partition_id, broker_group=partition.broker_group
            )
        start = _offset(options.start.at(partition.partition_id), status)
        end = _offset(options.end.at(partition.partition_id), status)
        if start > end:
            raise OffsetOutOfRangeError(
                f"the start, {start}, is after the end, {end}, in partition {partition.partition_id}",
                partition_id=partition.partition_id,
                offset=start,
                first_offset=status.first_offset,
                next_offset=end,
            )
        ranges.append(
            PlannedRange(
                partition_id=partition.partition_id,
                broker_group=partition.broker_group,
                address=str(partition.address),
                start=start,
                end=end,
                subject=route.subject,
                queue=partition.queue,
                logic_start=partition.logic_start,
                epoch=epochs[partition.partition_id],
            )
        )
    return ranges


def _offset(point: Point, status: PartitionStatus) -> int:
    if point is Edge.EARLIEST:
        return status.first_offset
    if point is Edge.LATEST:
        return status.next_offset
    assert isinstance(point, int)
    offset = point
    if not status.first_offset <= offset <= status.next_offset:
        raise OffsetOutOfRangeError(
            f"offset {offset} is not in partition {status.partition_id}",
            partition_id=status.partition_id,
            offset=offset,
            first_offset=status.first_offset,
            next_offset=status.next_offset,
        )
    return offset
