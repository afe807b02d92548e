"""Where each partition's cursor goes when a group's progress is set, and in which order.  Pure.

Invariants
    A group that is to handle a message again is to handle again, in order, all that is behind it in its queue: where a
    partition is not acked to its end, whatever continues it begins at its first message.
    An offset of a lost partition means the first message behind the loss.
    A reset of one partition sets that one, and looks at nothing else: there an operator answers for the order.
    Children are set before their parents: what is done after an interruption never leaves a gap behind what comes again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ...protocol.errors import InvalidRequestError
from ...protocol.progress import ResetGroup, ResetTo
from ...protocol.queues import (
    Segment,
    check_logic_offset,
    is_behind_loss,
    physical_cursors,
    queue_max,
    queue_min,
)
from ...protocol.routing import Partition


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionOffsets:
    """A partition as its broker has it: `[first_offset, next_offset)`, and the first message at or after the time."""

    partition: Partition
    first_offset: int
    next_offset: int
    at_time: int | None = None
    fence: int = 0
    """The group's."""

    @property
    def segment(self) -> Segment:
        """The same as a part of its queue."""
        return Segment(
            partition_id=self.partition.partition_id,
            logic_start=self.partition.logic_start,
            first_offset=self.first_offset,
            next_offset=self.next_offset,
        )


def check_ask(ask: ResetGroup, *, static: bool) -> None:
    """
    Let a request through that says one thing.

    Raises:
        InvalidRequestError
    """
    problems = []
    if (ask.to is ResetTo.OFFSET) != (ask.offset is not None):
        problems.append("an offset goes with to = offset, and only with it")
    if (ask.to is ResetTo.TIME) != (ask.at_ms is not None):
        problems.append("at_ms goes with to = time, and only with it")
    if ask.queue is not None and ask.partition_id is not None:
        problems.append("a queue or a partition, not both")
    if static and ask.partition_id is not None:
        problems.append("a static subject is set by queue: its partitions hang together")
    if ask.to is ResetTo.OFFSET and ask.queue is None and ask.partition_id is None:
        problems.append("an offset needs a queue or a partition: it is another message in each")
    if problems:
        raise InvalidRequestError("; ".join(problems))


def new_cursors(
    ask: ResetGroup, found: Sequence[PartitionOffsets], *, static: bool
) -> dict[int, int]:
    """
    Partition id → its new physical cursor.

    Raises:
        OffsetOutOfRangeError: the offset is not in the queue, or not in the partition.
    """
    if not static:
        return _alone(ask, found)
    cursors: dict[int, int] = {}
    for queue in sorted({one.partition.queue for one in found}):
        chain = [one for one in found if one.partition.queue == queue]
        chain.sort(key=lambda one: (one.partition.logic_start, one.partition.partition_id))
        segments = [one.segment for one in chain]
        at = _logic_offset(ask, chain, segments)
        ids = [segment.partition_id for segment in segments]
        cursors |= dict(zip(ids, physical_cursors(segments, at), strict=True))
    return cursors


def _logic_offset(
    ask: ResetGroup, chain: Sequence[PartitionOffsets], segments: Sequence[Segment]
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
            check_logic_offset(segments, at)
            return at
        case ResetTo.TIME:
            for one in chain:
                if one.at_time is not None:
                    return one.partition.logic_start + one.at_time
            return queue_max(segments)


def _alone(ask: ResetGroup, found: Sequence[PartitionOffsets]) -> dict[int, int]:
    """Partitions that are no queues: each by itself, but none ahead of what it continues."""
    cursors: dict[int, int] = {}
    behind: set[int] = set()
    for one in sorted(found, key=lambda one: one.partition.partition_id):  # parents have lower ids
        number = one.partition.partition_id
        cursor = one.first_offset
        if behind.isdisjoint(one.partition.parents):
            cursor = _physical(ask, one)
        cursors[number] = cursor
        if cursor < one.next_offset or not behind.isdisjoint(one.partition.parents):
            behind.add(number)
    return cursors


def _physical(ask: ResetGroup, one: PartitionOffsets) -> int:
    match ask.to:
        case ResetTo.EARLIEST:
            return one.first_offset
        case ResetTo.LATEST:
            return one.next_offset
        case ResetTo.OFFSET:
            assert ask.offset is not None
            check_logic_offset([one.segment], ask.offset)
            return ask.offset
        case ResetTo.TIME:
            return one.next_offset if one.at_time is None else one.at_time


def generations(partitions: Sequence[Partition]) -> list[list[int]]:
    """The ids in the order of setting: each partition before all that it continues."""
    depth: dict[int, int] = {}
    for one in sorted(partitions, key=lambda one: one.partition_id):
        depth[one.partition_id] = 1 + max(
            (depth.get(parent, -1) for parent in one.parents), default=-1
        )
    order: Mapping[int, list[int]] = {
        level: [key for key, at in depth.items() if at == level] for level in set(depth.values())
    }
    return [order[level] for level in sorted(order, reverse=True)]
