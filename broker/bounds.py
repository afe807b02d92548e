"""Where the messages of a partition begin and end, and where a time or a consumer group is in it,
for plans to read.
"""

from __future__ import annotations

from collections.abc import Callable

from ..protocol.control import TimeBound
from ..protocol.reading.bounds import BoundsOf, PartitionBounds
from .partition.partition import HostedPartition
from .store.store import Store

LOOKS_MAX = 5
"""Looks for a time that is still to come for this broker, where each finds messages that are
earlier.
"""


async def bounds_of(
    store: Store,
    partition: HostedPartition,
    asked: BoundsOf,
    removed_from_ms: Callable[[int], int | None],
) -> PartitionBounds:
    """
    The bounds of a partition.

    The index is asked first: what is stored meanwhile makes the bounds wider, so every offset found
    lies in them.

    Args:
        removed_from_ms: when a message that was stored then may be removed.

    Raises:
        CorruptLogError: the index is damaged there.
    """
    offsets = [await _first_at(store, partition, at_ms) for at_ms in asked.at_ms]
    head = await store.head(partition)
    end = partition.readable_offset
    groups = (partition.groups.get(group) for group in asked.groups)
    return PartitionBounds(
        partition_id=partition.partition_id,
        first_offset=partition.first_offset,
        next_offset=end,
        first_at_ms=None if head is None else head.appended_at_ms,
        removed_from_ms=None if head is None else removed_from_ms(head.appended_at_ms),
        message_bytes=0 if head is None else -(-head.length // head.message_count),
        offsets_at=tuple(None if offset == end else offset for offset in offsets),
        cursors=tuple(
            None if group is None or not group.kept else group.durable_cursor for group in groups
        ),
    )


async def _first_at(store: Store, partition: HostedPartition, at_ms: int) -> int:
    """
    The first message at this time or later; without one the end, as it was then: what is stored
    from there on is later.

    Where messages were stored during the look, these may be earlier or later, so it looks again.
    """
    for _ in range(LOOKS_MAX):
        end = partition.readable_offset
        offset = await store.offset_at(partition, at_ms, TimeBound.LOWER)
        if offset is not None:
            return offset
        if partition.readable_offset == end:
            break
    return partition.readable_offset
