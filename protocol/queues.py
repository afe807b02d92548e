"""Logic queues of a static subject: chains of partitions with continuous logic offsets. Pure.

    partition 3            partition 7          partition 9
    [0, 40)                [0, 25)              [0, …           physical: `offset`
    ├──────────────────────┼────────────────────┼────────▶
    0                      40                   65              logic = logic_start + offset

The end of a lost partition is unknown. The partition that continues it begins at 2**42 (the maximum
number of messages in a partition) times the number in its own name, which is above every earlier
logic offset of the queue.

    partition 3, s.p0      partition 7, s.p5: lost          partition 9, s.p8
    [0, 40)                [0, ?)                           [0, …
    ├──────────────────────┼╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌├────────▶
    0                      40                               8 · 2**42

Invariants
    The first partition of a chain begins at logic offset 0. Each other partition begins at its
    parent's end, or after a loss.
    Logic offsets rise along a chain, and each occurs once. Offsets are missing only before a
    partition that follows a loss, and where retention has removed messages.
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
    """A partition of a queue, and its place in the queue."""

    partition: Partition
    logic_end: int | None = None
    """The logic offset that follows its last message; None while it is open."""


class QueueView(Struct, frozen=True, kw_only=True):
    """A logic queue: its range of logical partitions, and its partitions that still have data,
    oldest first.
    """

    queue: int
    range_start: int
    range_end: int
    segments: tuple[SegmentView, ...]


class QueueList(Struct, frozen=True, kw_only=True):
    """The logic queues of a static subject, ordered by number."""

    subject: str
    route_version: int
    queues: list[QueueView]


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """A partition of a queue, with its stored offsets `[first_offset, next_offset)` and the logic
    offset of its offset 0.
    """

    partition_id: int
    logic_start: int
    first_offset: int
    next_offset: int

    @property
    def logic_first(self) -> int:
        """The logic offset of the first stored message, or the segment's end if no message is
        stored.
        """
        return self.logic_start + self.first_offset

    @property
    def logic_end(self) -> int:
        """The logic offset that follows its last message."""
        return self.logic_start + self.next_offset


def start_behind_loss(name: str) -> int:
    """
    Return the logic offset at which a partition begins if the end of its parent is unknown.

    Earlier partitions of the chain have lower numbers, and at most PARTITION_MESSAGES_MAX messages
    each, so their logic offsets are lower. The offset depends only on the name, so the same one is
    computed when the database is rebuilt.

    Raises:
        InvalidRequestError: the partition's number is so high that its logic offsets would exceed
            2**63 - 1.
    """
    number = partition_number(name)
    if number is None or number > _NUMBER_MAX:
        raise InvalidRequestError(
            f"partition {name!r} has no logic offset behind a loss: "
            f"its number is over {_NUMBER_MAX}"
        )
    return number * PARTITION_MESSAGES_MAX


def is_behind_loss(partition: Partition) -> bool:
    """Return True if an unknown number of messages was lost before this partition of its queue."""
    number = partition_number(partition.name)
    return (
        partition.logic_start > 0
        and number is not None
        and partition.logic_start == number * PARTITION_MESSAGES_MAX
    )


def build_segment(view: SegmentView, status: PartitionStatus) -> Segment:
    """Return a segment with the offsets that its broker reports."""
    return Segment(
        partition_id=view.partition.partition_id,
        logic_start=view.partition.logic_start,
        first_offset=status.first_offset,
        next_offset=status.next_offset,
    )


def queue_min(chain: Sequence[Segment]) -> int:
    """Return the logic offset of the first stored message of a queue, or `queue_max` if no message
    is stored.
    """
    first_offsets = (
        segment.logic_first for segment in chain if segment.first_offset < segment.next_offset
    )
    return next(first_offsets, queue_max(chain))


def queue_max(chain: Sequence[Segment]) -> int:
    """Return the logic offset that follows the last message of a queue."""
    return chain[-1].logic_end


def check_logic_offset(chain: Sequence[Segment], logic_offset: int) -> None:
    """
    Check that a logic offset is in the queue's `[min, max]`.

    Raises:
        OffsetOutOfRangeError: the logic offset is outside the queue.
    """
    low, high = queue_min(chain), queue_max(chain)
    if not low <= logic_offset <= high:
        raise outside_queue_error(logic_offset, low, high)


def outside_queue_error(logic_offset: int, low: int, high: int) -> OffsetOutOfRangeError:
    """Return the error for an offset that is not in a queue's `[low, high]`."""
    return OffsetOutOfRangeError(
        f"logic offset {logic_offset} is not in [{low}, {high}]",
        offset=logic_offset,
        first_offset=low,
        next_offset=high,
    )


def physical_cursors(chain: Sequence[Segment], logic_offset: int) -> list[int]:
    """
    Return the cursor in each segment for a cursor of the queue at `logic_offset`.

    Segments before the offset get a cursor at their end, the segment that contains it gets a cursor
    at the offset, and later segments get a cursor at their first offset.
    """
    return [
        min(max(logic_offset - segment.logic_start, segment.first_offset), segment.next_offset)
        for segment in chain
    ]


def logic_cursor(chain: Sequence[Segment], cursors: Mapping[int, int]) -> int:
    """
    Return the logic offset of the first message that a group has not acked, or `queue_max` if it
    has acked all messages.

    Args:
        cursors: maps partition ids to cursors, without partitions that the group has not read.
    """
    for segment in chain:
        cursor = max(cursors.get(segment.partition_id, 0), segment.first_offset)
        if cursor < segment.next_offset:
            return segment.logic_start + cursor
    return queue_max(chain)


def logic_offset_at(
    chain: Sequence[Segment], offsets: Iterable[int | None], bound: TimeBound
) -> int | None:
    """
    Return the logic offset of the message that a time refers to.

    Args:
        offsets: the result of looking up the time in each segment, an offset or None, in the order
            of the chain.
        bound: LOWER takes the first offset, UPPER the last.

    Returns:
        The logic offset, or None if no segment has such a message.
    """
    found_offsets = [
        segment.logic_start + offset
        for segment, offset in zip(chain, offsets, strict=True)
        if offset is not None
    ]
    if not found_offsets:
        return None
    return found_offsets[0] if bound is TimeBound.LOWER else found_offsets[-1]
