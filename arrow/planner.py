"""Plans once, from the routes and the brokers' answers, which offsets of which physical partitions
are read. Pure.

    routes ──select──▶ partitions that have data, may contain the keys, and are requested
                           │ bounds_request: one call to each broker
    bounds of each ────────┴─plan──▶ one PlannedRange each, half-open [start, end)

Invariants
    The ends are fixed before any reader exists, so a retry or a second action reads the same rows
    or fails with OffsetOutOfRangeError.
    A range of explicit offsets is never shortened: it is refused if some of them are not stored,
    unless the options allow data loss.
    Bounds given as times preserve key order: no message is skipped if a later message with the same
    key is read.

In contrast, Kafka's batch reader determines the end later, in each task, so a retry can see a
different end.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from graphlib import TopologicalSorter

from ..protocol.errors import (
    ConfigError,
    NotSentError,
    OffsetOutOfRangeError,
    PartitionUnknownError,
)
from ..protocol.reading.bounds import (
    BoundsOf,
    LocalPoint,
    PartitionBounds,
    nearest_ancestors,
    order_points,
)
from ..protocol.routing import Partition, PartitionState, Route, logical_partition
from .loss import loss_error
from .schema import PARTITION_MAX
from .selection import CursorOf, Edge, Point, ReadBound, ReadOptions, StoredAt

_STATES_WITH_DATA = frozenset({PartitionState.OPEN, PartitionState.SEALED})


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedRange:
    """The offsets `[start, end)` of one physical partition, and the broker that hosted it when the
    read was planned.
    """

    partition_id: int
    broker_group: str
    address: str
    start: int
    end: int
    subject: str
    range_start: int
    range_end: int
    """The logical partitions `[range_start, range_end)` of the partition."""
    queue: int
    logic_start: int
    """The logic offset that corresponds to offset 0 of the partition."""
    epoch: int
    """The depth in the lineage: 0 without parents, otherwise one more than the deepest parent.
    Parents that are missing from the route are ignored.
    """
    lineage: int = 0
    """The lowest id among this partition and all partitions that it is connected to through parents
    and children.
    """
    message_bytes: int = 0
    """The approximate size of a message in the log, in bytes."""
    removed_from_ms: int | None = None
    """The earliest time at which retention may remove the first messages, unless they are held;
    None if it never does.
    """

    @property
    def rows(self) -> int:
        """The number of rows."""
        return self.end - self.start

    @property
    def size_bytes(self) -> int:
        """The approximate size of the range in the log, in bytes."""
        return self.rows * self.message_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class SelectedPartition:
    """A partition to read, and its position in the subject's lineage."""

    subject: str
    partition: Partition
    epoch: int
    lineage: int
    continues: frozenset[int] = frozenset()
    """The nearest ancestors of this partition that are also selected."""


def lineage_depths(route: Route) -> dict[int, int]:
    """Return the depth of each partition in the lineage, by partition id: one more than that of its
    deepest parent in the route.
    """
    parents = {each.partition_id: each.parents for each in route.partitions}
    depth: dict[int, int] = {}
    for partition_id in TopologicalSorter(parents).static_order():
        if partition_id in parents:
            candidate_depths = [
                depth[parent] + 1 for parent in parents[partition_id] if parent in depth
            ]
            depth[partition_id] = max(candidate_depths, default=0)
    return depth


def lineage_ids(route: Route) -> dict[int, int]:
    """Return a lineage id for each partition: the lowest id among the partitions of the route that
    are connected to it through parents and children, itself included.
    """
    lowest = {int(each.partition_id): int(each.partition_id) for each in route.partitions}

    def find_lowest(partition_id: int) -> int:
        while lowest[partition_id] != partition_id:
            lowest[partition_id] = lowest[lowest[partition_id]]
            partition_id = lowest[partition_id]
        return partition_id

    for each in route.partitions:
        for parent in each.parents:
            if parent in lowest:
                low, high = sorted((find_lowest(each.partition_id), find_lowest(parent)))
                lowest[high] = low
    return {partition_id: find_lowest(partition_id) for partition_id in lowest}


def check_batch(options: ReadOptions) -> None:
    """Raise ConfigError if an option is only valid for a stream."""
    if options.start.manifest:
        raise ConfigError(
            "start: only a stream or a consumer group can begin at manifest:DIR; a batch begins at "
            "offsets, times or a group's cursor"
        )
    if options.commit_group is not None:
        raise ConfigError(
            "commitGroup: a group can follow only a stream; a batch of Spark does not report "
            "whether its sink has committed"
        )
    if options.max_rows_per_trigger is not None:
        raise ConfigError(
            "maxRowsPerTrigger: the option limits the batches of a stream; spark.read reads "
            "everything from `start` to `end`: remove the option, and set these to read fewer rows"
        )


def select_partitions(routes: Sequence[Route], options: ReadOptions) -> list[SelectedPartition]:
    """
    Return the partitions to read, sorted by subject and id: those that have data, may contain the
    requested keys, and are among the requested partitions.

    Raises:
        NotSentError: the broker group of a partition is not available.
        ConfigError: a partition's id does not fit into the column `partition`.
    """
    with_data = [
        SelectedPartition(
            subject=route.subject,
            partition=partition,
            epoch=epoch_of[partition.partition_id],
            lineage=lineage_of[partition.partition_id],
        )
        for route in routes
        for epoch_of, lineage_of in [(lineage_depths(route), lineage_ids(route))]
        for partition in sorted(route.partitions, key=lambda each: each.partition_id)
        if partition.state in _STATES_WITH_DATA
    ]
    may_contain_keys = {
        str(route.subject): _partitions_with_keys(route, options) for route in routes
    }
    selected = {
        int(each.partition.partition_id): each
        for each in with_data
        if (options.partitions is None or each.partition.partition_id in options.partitions)
        and each.partition.partition_id in may_contain_keys[each.subject]
    }
    for each in selected.values():
        _check_readable(each.partition)
    parents = {
        int(each.partition_id): map(int, each.parents)
        for route in routes
        for each in route.partitions
    }
    ancestors = nearest_ancestors(parents, selected.keys())
    return [replace(each, continues=ancestors[id_]) for id_, each in selected.items()]


def check_named_partitions(routes: Sequence[Route], options: ReadOptions) -> None:
    """Check that the partitions named in the options can be read. Raises PartitionUnknownError if
    one does not exist in the subjects, or its data was removed.
    """
    with_data = {
        int(partition.partition_id)
        for route in routes
        for partition in route.partitions
        if partition.state in _STATES_WITH_DATA
    }
    ids_by_option: dict[str, Iterable[int]] = {"partitions": options.partitions or ()}
    if options.fail_on_data_loss:
        ids_by_option |= {"start": options.start.by_partition, "end": options.end.by_partition}
    for option, ids in ids_by_option.items():
        unknown = sorted(set(ids) - with_data)
        if unknown:
            subjects = ", ".join(options.subjects)
            raise PartitionUnknownError(
                f"{option}: subject {subjects} has no data in partition {unknown[0]}",
                partition_id=unknown[0],
                subject=subjects,
            )


def _partitions_with_keys(route: Route, options: ReadOptions) -> set[int]:
    """Return the ids of the partitions that may contain messages with the requested keys."""
    # If keys may leave their partitions, a message can be in any partition of the subject.
    if options.keys is None or route.may_reroute_keys:
        return {int(each.partition_id) for each in route.partitions}
    logical_partitions = {logical_partition(key) for key in options.keys}
    return {
        int(each.partition_id)
        for each in route.partitions
        if any(each.range_start <= number < each.range_end for number in logical_partitions)
    }


def _check_readable(partition: Partition) -> None:
    if partition.partition_id > PARTITION_MAX:
        raise ConfigError(
            f"partition {partition.partition_id} cannot be read: its id is above {PARTITION_MAX}",
        )
    if partition.address is None:
        raise NotSentError(
            f"broker group {partition.broker_group}, which has partition "
            f"{partition.partition_id}, is not available; name other partitions in the option "
            "`partitions` to read without it",
            partition_id=partition.partition_id,
            broker_group=partition.broker_group,
        )


def bounds_request(partition: Partition, options: ReadOptions) -> BoundsOf:
    """Return the request that asks a partition's broker for the bounds of the range."""
    points = [bound.at(partition.partition_id) for bound in (options.start, options.end)]
    return BoundsOf(
        partition_id=partition.partition_id,
        at_ms=tuple(point.at_ms for point in points if isinstance(point, StoredAt)),
        groups=tuple(point.group for point in points if isinstance(point, CursorOf)),
    )


def plan_ranges(
    selected: Sequence[SelectedPartition],
    answers: Mapping[int, PartitionBounds],
    options: ReadOptions,
) -> list[PlannedRange]:
    """
    Return one range per partition, even if it is empty, in the order of `selected`.

    Args:
        selected: the result of `select_partitions`.
        answers: the brokers' answers to `bounds_request`, by partition id.

    Raises:
        PartitionUnknownError: no broker has the partition.
        DataLossError: retention has removed rows of the range.
        OffsetOutOfRangeError: an offset in the options does not exist in its partition, or the
            start is after the end.
    """
    bounds: dict[int, PartitionBounds] = {}
    starts, ends = {}, {}
    for each in selected:
        id_ = int(each.partition.partition_id)
        answer = answers.get(id_)
        if answer is None:
            raise PartitionUnknownError(partition_id=id_, broker_group=each.partition.broker_group)
        bounds[id_] = answer
        # An answer lists the times and the groups of the start first, then those of the end.
        offsets_at, cursors = list(answer.offsets_at), list(answer.cursors)
        starts[id_] = _resolve("start", options.start.at(id_), answer, offsets_at, cursors)
        ends[id_] = _resolve("end", options.end.at(id_), answer, offsets_at, cursors)
    _order_times(options.start, starts, bounds, selected)
    _order_times(options.end, ends, bounds, selected)
    return [
        _planned_range(each, bounds[id_], starts[id_], ends[id_], options)
        for each in selected
        for id_ in [int(each.partition.partition_id)]
    ]


def _order_times(
    bound: ReadBound,
    offsets: dict[int, int],
    bounds: Mapping[int, PartitionBounds],
    selected: Sequence[SelectedPartition],
) -> None:
    """
    Adjust the offsets of bounds that were given as times, so that no unread message precedes a
    message with the same key that is read.

    Args:
        offsets: the offset of the bound in each partition, by partition id; changed in place.
        bounds: the brokers' answers, by partition id.
    """
    times = {
        id_: LocalPoint(bounds[id_].first_offset, bounds[id_].next_offset, offset)
        for id_, offset in offsets.items()
        if isinstance(bound.at(id_), StoredAt)
    }
    if times:
        parents = {int(each.partition.partition_id): each.continues for each in selected}
        offsets.update(order_points(times, parents))


def _planned_range(
    selected: SelectedPartition,
    answer: PartitionBounds,
    start: int,
    end: int,
    options: ReadOptions,
) -> PlannedRange:
    partition = selected.partition
    first_offset = answer.first_offset
    if not options.fail_on_data_loss:
        start, end = max(start, first_offset), max(end, first_offset)
    if start > end:
        raise OffsetOutOfRangeError(
            f"start: offset {start} is after the end, {end}, in partition {partition.partition_id}",
            partition_id=partition.partition_id,
            offset=start,
            first_offset=answer.first_offset,
            next_offset=end,
        )
    if start < first_offset and start < end:
        raise loss_error(selected.subject, answer, start, min(first_offset, end))
    return PlannedRange(
        partition_id=partition.partition_id,
        broker_group=partition.broker_group,
        address=str(partition.address),
        start=start,
        end=end,
        subject=selected.subject,
        range_start=partition.range_start,
        range_end=partition.range_end,
        queue=partition.queue,
        logic_start=partition.logic_start,
        epoch=selected.epoch,
        lineage=selected.lineage,
        message_bytes=answer.message_bytes,
        removed_from_ms=answer.removed_from_ms,
    )


def _resolve(
    option: str,
    point: Point,
    answer: PartitionBounds,
    offsets_at: list[int | None],
    cursors: list[int | None],
) -> int:
    """
    Return the offset of a point in one partition.

    Args:
        option: the name of the option, for error messages.
        offsets_at: the broker's offsets for times; the first one is removed if `point` is a time.
        cursors: the cursors of groups; the first one is removed if `point` is a group's cursor.

    Raises:
        OffsetOutOfRangeError: the offset is after the last message.
    """
    match point:
        case Edge.EARLIEST:
            return answer.first_offset
        case Edge.LATEST:
            return answer.next_offset
        case StoredAt():
            offset_at = offsets_at.pop(0)
            # Retention may have removed the offset since the broker found it.
            return answer.next_offset if offset_at is None else max(offset_at, answer.first_offset)
        case CursorOf():
            cursor = cursors.pop(0)
            return answer.first_offset if cursor is None else min(cursor, answer.next_offset)
        case offset:
            assert isinstance(offset, int)
    if offset > answer.next_offset:
        raise OffsetOutOfRangeError(
            f"{option}: offset {offset} is not in partition {answer.partition_id}, "
            f"which has [{answer.first_offset}, {answer.next_offset})",
            partition_id=answer.partition_id,
            offset=offset,
            first_offset=answer.first_offset,
            next_offset=answer.next_offset,
        )
    return offset
