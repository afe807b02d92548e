"""Finds where the messages of a partition begin and end, and where a time or a consumer group is in
it. Plans read this.
"""

from __future__ import annotations

from collections.abc import Callable

from ..protocol.control import TimeBound
from ..protocol.reading.bounds import BoundsOf, PartitionBounds
from .partition.partition import HostedPartition
from .store.store import Store

LOOKS_MAX = 5
"""The greatest number of searches for a time that this broker's clock has not reached, if messages
with earlier times are stored during each search.
"""


async def bounds_of(
    store: Store,
    partition: HostedPartition,
    asked: BoundsOf,
    removed_from_ms: Callable[[int], int | None],
) -> PartitionBounds:
    """
    Return the bounds of a partition.

    The index is read first. Messages that are stored meanwhile only widen the bounds, so every
    offset found lies within them.

    Args:
        removed_from_ms: returns the time from which a message that was stored at a given time may
            be removed.

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
    Return the offset of the first message at this time or later. If there is none, return the end
    offset at the time of the search: messages stored after it are later.

    If messages were stored during the search, they may be earlier or later than `at_ms`, so the
    search is repeated.
    """
    for _ in range(LOOKS_MAX):
        end = partition.readable_offset
        offset = await store.offset_at(partition, at_ms, TimeBound.LOWER)
        if offset is not None:
            return offset
        if partition.readable_offset == end:
            break
    return partition.readable_offset
