"""Logic queues of a static subject: chains of partitions whose offsets go on where the one before ended.  Pure.

    GET  /v1/subjects/{subject}/queues      –    → QueueList      (to the metaserver)

    partition 3            partition 7          partition 9
    [0, 40)                [0, 25)              [0, …           physical: `offset`
    ├──────────────────────┼────────────────────┼────────▶
    0                      40                   65              logic = logic_start + offset

Invariants
    The first partition of a chain begins at logic offset 0, each other where its parent was sealed: no offset of a
    queue is missing, and none is there twice.
    What retention removed is missing at the head of a partition, and nowhere else.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from msgspec import Struct

from .control import PartitionStatus, TimeBound
from .errors import OffsetOutOfRangeError
from .routing import Partition


class SegmentView(Struct, frozen=True, kw_only=True):
    """A partition of a queue, and where it lies in the queue."""

    partition: Partition
    logic_end: int | None = None
    """One past its last logic offset; None while it is open."""


class QueueView(Struct, frozen=True, kw_only=True):
    """A logic queue: its range of logical partitions, and its partitions that still have data, the oldest first."""

    queue: int
    range_start: int
    range_end: int
    segments: tuple[SegmentView, ...]


class QueueList(Struct, frozen=True, kw_only=True):
    """The logic queues of a static subject, by number."""

    subject: str
    route_version: int
    queues: list[QueueView]


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """A partition's messages `[first_offset, next_offset)`, physical, and the logic offset of its offset 0."""

    partition_id: int
    logic_start: int
    first_offset: int
    next_offset: int

    @property
    def logic_first(self) -> int:
        """Logic offset of its first message still there; its end if there is none."""
        return self.logic_start + self.first_offset

    @property
    def logic_end(self) -> int:
        """One past the logic offset of its last message."""
        return self.logic_start + self.next_offset


def segment_of(view: SegmentView, status: PartitionStatus) -> Segment:
    """A segment as its broker has it."""
    return Segment(
        partition_id=view.partition.partition_id,
        logic_start=view.partition.logic_start,
        first_offset=status.first_offset,
        next_offset=status.next_offset,
    )


def queue_min(chain: Sequence[Segment]) -> int:
    """Logic offset of the first message of a queue; its max if there is none."""
    found = (one.logic_first for one in chain if one.first_offset < one.next_offset)
    return next(found, queue_max(chain))


def queue_max(chain: Sequence[Segment]) -> int:
    """One past the logic offset of the last message of a queue."""
    return chain[-1].logic_end


def check_logic_offset(chain: Sequence[Segment], logic_offset: int) -> None:
    """
    Let a logic offset in `[min, max]` through.

    Raises:
        OffsetOutOfRangeError: any other.
    """
    low, high = queue_min(chain), queue_max(chain)
    if not low <= logic_offset <= high:
        raise outside(logic_offset, low, high)


def outside(logic_offset: int, low: int, high: int) -> OffsetOutOfRangeError:
    """The error of an offset that is not in a queue's `[low, high]`."""
    return OffsetOutOfRangeError(
        f"logic offset {logic_offset} is not in [{low}, {high}]",
        offset=logic_offset,
        first_offset=low,
        next_offset=high,
    )


def physical_cursors(chain: Sequence[Segment], logic_offset: int) -> list[int]:
    """
    The cursor of each segment for a group that is at `logic_offset`: segments before it at their end, the one it is
    in at it, those behind it at their first message.
    """
    return [
        min(max(logic_offset - one.logic_start, one.first_offset), one.next_offset) for one in chain
    ]


def logic_cursor(chain: Sequence[Segment], cursors: Mapping[int, int]) -> int:
    """
    Logic offset of the first message that a group has not acked; the queue's max if it has acked all.

    Args:
        cursors: partition id → physical cursor; a partition the group has not come to is not in it.
    """
    for one in chain:
        cursor = max(cursors.get(one.partition_id, 0), one.first_offset)
        if cursor < one.next_offset:
            return one.logic_start + cursor
    return queue_max(chain)


def logic_offset_at(
    chain: Sequence[Segment], found: Iterable[int | None], bound: TimeBound
) -> int | None:
    """
    The logic offset for a time.

    Args:
        found: what the same lookup found in each segment, a physical offset or None, in the order of the chain.
        bound: LOWER takes the first of them, UPPER the last.

    Returns:
        None if no segment has such a message.
    """
    hits = [
        one.logic_start + offset
        for one, offset in zip(chain, found, strict=True)
        if offset is not None
    ]
    if not hits:
        return None
    return hits[0] if bound is TimeBound.LOWER else hits[-1]
