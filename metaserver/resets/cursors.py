"""Computes the new cursor of each partition for a reset, and the order in which they are set. Pure.

Invariants
    A group that handles a message again also handles every later message of its queue again, in
    order. So if a partition is not fully acked, its children start at their first message,
    including children that begin another queue.
    An offset in a lost partition stands for the first message after the loss.
    A reset that has begun has a cursor for every remaining partition, because it can no longer be
    stopped.
    A reset of one partition or queue sets only that one. The operator is responsible for the order
    of keys that continue in others.
    Children are set before their parents, so that after an interrupted reset, no message is skipped
    after a repeated one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ...protocol.errors import InvalidRequestError, OffsetOutOfRangeError, PartitionUnknownError
from ...protocol.progress import ResetGroup, ResetTo
from ...protocol.queues import (
    Segment,
    check_logic_offset,
    is_behind_loss,
    logic_cursor,
    physical_cursors,
    queue_max,
    queue_min,
)
from ...protocol.reading.bounds import LocalPoint, order_points
from ...protocol.routing import Partition, PartitionState

PLACE_HINT = (
    "Nothing was changed. Give an offset from first_offset to next_offset, or reset to earliest, "
    "latest or a time."
)
"""Hint for an offset outside a queue or partition; the error's default hint is meant for
readers.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionOffsets:
    """The offsets of a partition at its broker, as `[first_offset, next_offset)`."""

    partition: Partition
    first_offset: int
    next_offset: int
    offset_at_time: int | None = None
    """Offset of the first message stored at or after the requested time, if there is one."""
    cursor: int | None = None
    """The group's current cursor; None if the broker does not know the group."""
    fence: int = 0
    """Highest token of the group that the broker has seen."""

    @property
    def current_offset(self) -> int:
        """Offset of the first message that the group has not acked."""
        return self.first_offset if self.cursor is None else max(self.cursor, self.first_offset)

    @property
    def is_drained(self) -> bool:
        """True if the partition is sealed and the group has fully acked it."""
        return (
            self.partition.state is PartitionState.SEALED
            and self.current_offset >= self.next_offset
        )

    @property
    def segment(self) -> Segment:
        """The partition as a segment of its queue."""
        return Segment(
            partition_id=self.partition.partition_id,
            logic_start=self.partition.logic_start,
            first_offset=self.first_offset,
            next_offset=self.next_offset,
        )


def check_request(request: ResetGroup, *, static: bool) -> None:
    """
    Check that a request is unambiguous.

    Raises:
        InvalidRequestError: the message lists every problem.
    """
    problems = []
    if (request.to is ResetTo.OFFSET) != (request.offset is not None):
        problems.append("an offset goes with to = offset, and only with it")
    if (request.to is ResetTo.TIME) != (request.at_ms is not None):
        problems.append("at_ms goes with to = time, and only with it")
    if (request.to is ResetTo.SHIFT) != (request.shift is not None):
        problems.append("shift goes with to = shift, and only with it")
    if request.shift == 0:
        problems.append("a shift of 0 changes nothing")
    if request.to is ResetTo.SHIFT and not request.dry_run:
        problems.append("a shift is planned with dry_run; then set the plan's cursors")
    if (request.to is ResetTo.CURSORS) != bool(request.cursors):
        problems.append("cursors go with to = cursors, and only with it")
    if request.queue is not None and request.partition_id is not None:
        problems.append("give a queue or a partition, not both")
    if static and request.partition_id is not None:
        problems.append(
            "a static subject is reset by queue, because its partitions depend on each other"
        )
    if request.to is ResetTo.OFFSET and request.queue is None and request.partition_id is None:
        problems.append(
            "an offset needs a queue or a partition, because each has another message there"
        )
    if problems:
        raise InvalidRequestError("; ".join(problems))


def compute_cursors(
    request: ResetGroup,
    all_offsets: Sequence[PartitionOffsets],
    *,
    static: bool,
    begun: bool = False,
) -> dict[int, int]:
    """
    Return a dict that maps each partition id to its new cursor.

    Args:
        begun: True if some cursors may already have been set. In that case, an offset that is no
            longer stored is replaced by the nearest one that is, and removed partitions are left
            out.

    Raises:
        OffsetOutOfRangeError: the offset is not in the queue, or not in the partition.
        PartitionUnknownError: the request names a partition that is not among `all_offsets`.
    """
    unknown_ids = set(request.cursors or ()) - {
        int(offsets.partition.partition_id) for offsets in all_offsets
    }
    if unknown_ids and not begun:
        raise PartitionUnknownError(
            f"partition {min(unknown_ids)} is not among those to set", partition_id=min(unknown_ids)
        )
    by_queue = static and request.to is not ResetTo.CURSORS
    offsets_by_id = {int(offsets.partition.partition_id): offsets for offsets in all_offsets}
    if by_queue:
        target_cursors = _queue_cursors(request, all_offsets, begun)
    else:
        target_cursors = {
            partition_id: _physical_cursor(request, offsets, begun)
            for partition_id, offsets in offsets_by_id.items()
        }
    points = {
        partition_id: LocalPoint(
            offsets.first_offset, offsets.next_offset, target_cursors[partition_id]
        )
        for partition_id, offsets in offsets_by_id.items()
    }
    parents = {
        partition_id: offsets.partition.parents for partition_id, offsets in offsets_by_id.items()
    }
    return order_points(points, parents)


def _queue_cursors(
    request: ResetGroup, all_offsets: Sequence[PartitionOffsets], begun: bool
) -> dict[int, int]:
    """Return a dict that maps each partition id to its cursor, for a request by queue."""
    cursors: dict[int, int] = {}
    for queue in sorted({offsets.partition.queue for offsets in all_offsets}):
        chain = [offsets for offsets in all_offsets if offsets.partition.queue == queue]
        chain.sort(
            key=lambda offsets: (offsets.partition.logic_start, offsets.partition.partition_id)
        )
        segments = [offsets.segment for offsets in chain]
        logic_offset = _target_offset(request, chain, segments, begun)
        ids = [segment.partition_id for segment in segments]
        cursors |= dict(zip(ids, physical_cursors(segments, logic_offset), strict=True))
    return cursors


def _target_offset(
    request: ResetGroup, chain: Sequence[PartitionOffsets], segments: Sequence[Segment], begun: bool
) -> int:
    """Return the logic offset to which a request resets a queue. Raises OffsetOutOfRangeError."""
    match request.to:
        case ResetTo.EARLIEST:
            return queue_min(segments)
        case ResetTo.LATEST:
            return queue_max(segments)
        case ResetTo.OFFSET:
            assert request.offset is not None
            offset = request.offset
            if is_behind_loss(chain[0].partition):
                offset = max(offset, segments[0].logic_start)
            return _clamp_to_queue(segments, offset, begun)
        case ResetTo.TIME:
            for offsets in chain:
                if offsets.offset_at_time is not None:
                    return offsets.partition.logic_start + offsets.offset_at_time
            return queue_max(segments)
        case ResetTo.SHIFT:
            assert request.shift is not None
            current_offsets = {
                int(offsets.partition.partition_id): offsets.current_offset for offsets in chain
            }
            offset = logic_cursor(segments, current_offsets) + request.shift
            return min(max(offset, queue_min(segments)), queue_max(segments))
        case ResetTo.CURSORS:
            raise AssertionError("cursors name partitions")


def _clamp_to_queue(segments: Sequence[Segment], offset: int, begun: bool) -> int:
    """
    Return a logic offset that the queue stores or that it will assign next.

    Args:
        begun: True if the reset has begun, in which case the nearest such offset is returned.

    Raises:
        OffsetOutOfRangeError: the queue does not have the offset.
    """
    if begun:
        return min(max(offset, queue_min(segments)), queue_max(segments))
    try:
        check_logic_offset(segments, offset)
    except OffsetOutOfRangeError as error:
        error.hint = PLACE_HINT
        raise
    return offset


def _clamp_to_partition(offsets: PartitionOffsets, offset: int, begun: bool) -> int:
    """Like `_clamp_to_queue`, but for an offset in one partition."""
    low, high = offsets.first_offset, offsets.next_offset
    if begun:
        return min(max(offset, low), high)
    if low <= offset <= high:
        return offset
    partition_id = int(offsets.partition.partition_id)
    error = OffsetOutOfRangeError(
        f"offset {offset} of partition {partition_id} is not in [{low}, {high}]",
        partition_id=partition_id,
        offset=offset,
        first_offset=low,
        next_offset=high,
    )
    error.hint = PLACE_HINT
    raise error


def _physical_cursor(request: ResetGroup, offsets: PartitionOffsets, begun: bool) -> int:
    """Return the offset to which a request resets one partition. Raises OffsetOutOfRangeError."""
    match request.to:
        case ResetTo.EARLIEST:
            return offsets.first_offset
        case ResetTo.LATEST:
            return offsets.next_offset
        case ResetTo.OFFSET:
            assert request.offset is not None
            return _clamp_to_partition(offsets, request.offset, begun)
        case ResetTo.TIME:
            return offsets.next_offset if offsets.offset_at_time is None else offsets.offset_at_time
        case ResetTo.SHIFT:
            assert request.shift is not None
            if offsets.is_drained:  # its children are shifted, so that no message is counted twice
                return offsets.next_offset
            return min(
                max(offsets.current_offset + request.shift, offsets.first_offset),
                offsets.next_offset,
            )
        case ResetTo.CURSORS:
            assert request.cursors is not None
            cursor = request.cursors.get(
                int(offsets.partition.partition_id), offsets.current_offset
            )
            return _clamp_to_partition(offsets, cursor, begun)


def order_generations(partitions: Sequence[Partition]) -> list[list[int]]:
    """Return the partition ids in groups, in the order in which they are set: children before
    parents.
    """
    depths: dict[int, int] = {}
    for partition in sorted(partitions, key=lambda partition: partition.partition_id):
        depths[partition.partition_id] = 1 + max(
            (depths.get(parent, -1) for parent in partition.parents), default=-1
        )
    ids_by_level: Mapping[int, list[int]] = {
        level: [partition_id for partition_id, depth in depths.items() if depth == level]
        for level in set(depths.values())
    }
    return [ids_by_level[level] for level in sorted(ids_by_level, reverse=True)]
