"""Logic queues of a static subject: chains of partitions whose offsets go on where the one before ended.  Pure.

    partition 3            partition 7          partition 9
    [0, 40)                [0, 25)              [0, …           physical: `offset`
    ├──────────────────────┼────────────────────┼────────▶
    0                      40                   65              logic = logic_start + offset

A partition whose disk is lost for good may have ended anywhere.  What continues it begins at a multiple of the most
that a partition holds, by the number in its own name: above all that the queue has ever had.

    partition 3, s.p0      partition 7, s.p5: lost          partition 9, s.p8
    [0, 40)                [0, ?)                           [0, …
    ├──────────────────────┼╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌├────────▶
    0                      40                               8 · 2**42

Invariants
    The first partition of a chain begins at logic offset 0, each other where its parent was sealed, or behind a loss.
    Logic offsets grow along a chain, and none is there twice.  Offsets are missing before a partition behind a loss,
    and where retention has removed the head of a partition; nowhere else.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from msgspec import Struct

from .control import PartitionStatus, TimeBound
from .errors import InvalidRequestError, OffsetOutOfRangeError
from .ids import MAX_I64, partition_number
from .limits import PARTITION_MESSAGES_MAX
from .routing import Partition

_NUMBER_MAX = MAX_I64 // PARTITION_MESSAGES_MAX - 1


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


def start_behind_loss(name: str) -> int:
    """
    The logic offset at which a partition begins that continues a lost one of which nobody knows the end.

    Each partition of its chain before it has a lower number and at most PARTITION_MESSAGES_MAX messages: so all of
    their logic offsets are lower.  The name is on the broker's disk, so that a rebuild finds the same offset.

    Raises:
        InvalidRequestError: the subject has had so many partitions that offsets end there.
    """
    number = partition_number(name)
    if number is None or number > _NUMBER_MAX:
        raise InvalidRequestError(
            f"logic offsets cannot go on in partition {name!r} behind a loss: they end at number {_NUMBER_MAX}"
        )
    return number * PARTITION_MESSAGES_MAX


def is_behind_loss(one: Partition) -> bool:
    """True if messages before this partition in its queue are lost, and nobody knows how many."""
    number = partition_number(one.name)
    return (
        one.logic_start > 0
        and number is not None
        and one.logic_start == number * PARTITION_MESSAGES_MAX
    )


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
