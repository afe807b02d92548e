"""Computes the cursor of each partition for a reset, and the order of setting them. Pure.

Invariants
    A group that handles a message again handles every later message of its queue again, in order:
    if a partition is not acked to its end, its children begin at their first message, including
    children that begin another queue.
    An offset of a lost partition stands for the first message after the loss.
    A reset that has begun has a cursor for every partition that is left, because nothing may stop
    it any more.
    A reset of one partition or queue sets only that one; the operator is responsible for the order
    of keys that continue in others.
    Children are set before their parents, so that an interrupted reset leaves no gap after a
    message that comes again.
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
from ...protocol.reading.bounds import OwnPlace, place_in_order
from ...protocol.routing import Partition, PartitionState

PLACE_HINT = (
    "Nothing was changed. Give an offset from first_offset to next_offset, or reset to earliest, "
    "latest or a time."
)
"""Hint for an offset that a queue or a partition does not have; the error's own hint is for
readers.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionOffsets:
    """The offsets of a partition at its broker, `[first_offset, next_offset)`, and the first one at
    or after a time.
    """

    partition: Partition
    first_offset: int
    next_offset: int
    at_time: int | None = None
    cursor: int | None = None
    """The group's present cursor; None if the broker does not know the group."""
    fence: int = 0
    """Highest token of the group that the broker has seen."""

    @property
    def present(self) -> int:
        """Offset of the first message that the group has not acked."""
        return self.first_offset if self.cursor is None else max(self.cursor, self.first_offset)

    @property
    def drained(self) -> bool:
        """True if the partition is sealed, and the group has acked it to its end."""
        return self.partition.state is PartitionState.SEALED and self.present >= self.next_offset

    @property
    def segment(self) -> Segment:
        """The partition as a segment of its queue."""
        return Segment(
            partition_id=self.partition.partition_id,
            logic_start=self.partition.logic_start,
            first_offset=self.first_offset,
            next_offset=self.next_offset,
        )


def check_ask(ask: ResetGroup, *, static: bool) -> None:
    """
    Check that a request has exactly one meaning.

    Raises:
        InvalidRequestError: the text has every problem.
    """
    problems = []
    if (ask.to is ResetTo.OFFSET) != (ask.offset is not None):
        problems.append("an offset goes with to = offset, and only with it")
    if (ask.to is ResetTo.TIME) != (ask.at_ms is not None):
        problems.append("at_ms goes with to = time, and only with it")
    if (ask.to is ResetTo.SHIFT) != (ask.shift is not None):
        problems.append("shift goes with to = shift, and only with it")
    if ask.shift == 0:
        problems.append("a shift of 0 changes nothing")
    if ask.to is ResetTo.SHIFT and not ask.dry_run:
        problems.append("a shift is planned with dry_run; then set the plan's cursors")
    if (ask.to is ResetTo.CURSORS) != bool(ask.cursors):
        problems.append("cursors go with to = cursors, and only with it")
    if ask.queue is not None and ask.partition_id is not None:
        problems.append("give a queue or a partition, not both")
    if static and ask.partition_id is not None:
        problems.append(
            "a static subject is reset by queue, because its partitions depend on each other"
        )
    if ask.to is ResetTo.OFFSET and ask.queue is None and ask.partition_id is None:
        problems.append(
            "an offset needs a queue or a partition, because each has another message there"
        )
    if problems:
        raise InvalidRequestError("; ".join(problems))


def new_cursors(
    ask: ResetGroup, parts: Sequence[PartitionOffsets], *, static: bool, begun: bool = False
) -> dict[int, int]:
    """
    Return partition id → its new cursor.

    Args:
        begun: True if cursors may be set already. Then an offset that is no longer stored is
            replaced by the nearest one that is, and gone partitions are left out.

    Raises:
        OffsetOutOfRangeError: the offset is not in the queue, or not in the partition.
        PartitionUnknownError: the request names a partition that is not among `parts`.
    """
    strange = set(ask.cursors or ()) - {int(part.partition.partition_id) for part in parts}
    if strange and not begun:
        raise PartitionUnknownError(
            f"partition {min(strange)} is not among those to set", partition_id=min(strange)
        )
    by_queue = static and ask.to is not ResetTo.CURSORS
    wanted = _of_queues(ask, parts, begun) if by_queue else _of_partitions(ask, parts, begun)
    each = {int(part.partition.partition_id): part for part in parts}
    own = {
        number: OwnPlace(part.first_offset, part.next_offset, wanted[number])
        for number, part in each.items()
    }
    parents = {number: part.partition.parents for number, part in each.items()}
    return place_in_order(own, parents)


def _of_queues(ask: ResetGroup, parts: Sequence[PartitionOffsets], begun: bool) -> dict[int, int]:
    """Return partition id → cursor for a request by queue."""
    cursors: dict[int, int] = {}
    for queue in sorted({part.partition.queue for part in parts}):
        chain = [part for part in parts if part.partition.queue == queue]
        chain.sort(key=lambda part: (part.partition.logic_start, part.partition.partition_id))
        segments = [part.segment for part in chain]
        at = _logic_offset(ask, chain, segments, begun)
        ids = [segment.partition_id for segment in segments]
        cursors |= dict(zip(ids, physical_cursors(segments, at), strict=True))
    return cursors


def _logic_offset(
    ask: ResetGroup, chain: Sequence[PartitionOffsets], segments: Sequence[Segment], begun: bool
) -> int:
    match ask.to:
        case ResetTo.EARLIEST:
            return queue_min(segments)
        case ResetTo.LATEST:
            return queue_max(segments)
        case ResetTo.OFFSET:
            assert ask.offset is not None
            at = ask.offset
            if is_behind_loss(chain[0].partition):
                at = max(at, segments[0].logic_start)
            return _stored(segments, at, begun)
        case ResetTo.TIME:
            for part in chain:
                if part.at_time is not None:
                    return part.partition.logic_start + part.at_time
            return queue_max(segments)
        case ResetTo.SHIFT:
            assert ask.shift is not None
            present = {int(part.partition.partition_id): part.present for part in chain}
            at = logic_cursor(segments, present) + ask.shift
            return min(max(at, queue_min(segments)), queue_max(segments))
        case ResetTo.CURSORS:
            raise AssertionError("cursors name partitions")


def _stored(segments: Sequence[Segment], at: int, begun: bool) -> int:
    """Return a stored logic offset or the next one; for a reset that has begun, the nearest stored
    one. Raises OffsetOutOfRangeError.
    """
    if begun:
        return min(max(at, queue_min(segments)), queue_max(segments))
    try:
        check_logic_offset(segments, at)
    except OffsetOutOfRangeError as error:
        error.hint = PLACE_HINT
        raise
    return at


def _stored_in(part: PartitionOffsets, at: int, begun: bool) -> int:
    """Return `_stored` for an offset of one partition."""
    low, high = part.first_offset, part.next_offset
    if begun:
        return min(max(at, low), high)
    if low <= at <= high:
        return at
    number = int(part.partition.partition_id)
    error = OffsetOutOfRangeError(
        f"offset {at} of partition {number} is not in [{low}, {high}]",
        partition_id=number,
        offset=at,
        first_offset=low,
        next_offset=high,
    )
    error.hint = PLACE_HINT
    raise error


def _of_partitions(
    ask: ResetGroup, parts: Sequence[PartitionOffsets], begun: bool
) -> dict[int, int]:
    """Return partition id → cursor for a request by partition."""
    return {part.partition.partition_id: _physical(ask, part, begun) for part in parts}


def _physical(ask: ResetGroup, part: PartitionOffsets, begun: bool) -> int:
    match ask.to:
        case ResetTo.EARLIEST:
            return part.first_offset
        case ResetTo.LATEST:
            return part.next_offset
        case ResetTo.OFFSET:
            assert ask.offset is not None
            return _stored_in(part, ask.offset, begun)
        case ResetTo.TIME:
            return part.next_offset if part.at_time is None else part.at_time
        case ResetTo.SHIFT:
            assert ask.shift is not None
            if part.drained:  # its children are shifted, so that no message counts twice
                return part.next_offset
            return min(max(part.present + ask.shift, part.first_offset), part.next_offset)
        case ResetTo.CURSORS:
            assert ask.cursors is not None
            cursor = ask.cursors.get(int(part.partition.partition_id), part.present)
            return _stored_in(part, cursor, begun)


def generations(partitions: Sequence[Partition]) -> list[list[int]]:
    """Return the ids in the order of setting, in groups: each partition before its parents."""
    depth: dict[int, int] = {}
    for partition in sorted(partitions, key=lambda partition: partition.partition_id):
        depth[partition.partition_id] = 1 + max(
            (depth.get(parent, -1) for parent in partition.parents), default=-1
        )
    order: Mapping[int, list[int]] = {
        level: [key for key, at in depth.items() if at == level] for level in set(depth.values())
    }
    return [order[level] for level in sorted(order, reverse=True)]
