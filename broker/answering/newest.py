"""Finds the newest message of a partition, or of one of its order keys, by reading the last batches
backward. The search has a limit, because there is no index by key.
"""

from __future__ import annotations

from ...protocol.batch import batch_starts, column_views
from ...protocol.errors import CorruptBatchError
from ...protocol.message import TAGS_PROPERTY, unpack_properties
from ...protocol.reading.newest import NewestMessage
from ...rpc.answer_budget import reserve_bytes
from ..partition.partition import HostedPartition
from ..store.store import Store

SEARCH_BYTES = 4 << 20
"""The maximum size of the batches that one search reads, in bytes. A single batch that is larger is
read whole.
"""


async def find_newest(
    store: Store, partition: HostedPartition, key: bytes | None, group: str, *, wall_ms: int
) -> NewestMessage:
    """
    Return the newest message of a partition.

    Args:
        key: only messages with this order key count; None: any message.
        group: the consumer group that may have acked it; "": none.
        wall_ms: the time by the clock with which messages are stored, in milliseconds since 1970.

    Raises:
        CorruptLogError: the index or a batch is damaged at this place.
    """
    first, end = partition.first_offset, partition.readable_offset
    found: tuple[int, int, tuple[str, ...]] | None = None
    start = end
    if first < end:
        start = await store.find_tail(partition, bytes_max=SEARCH_BYTES)
        await reserve_bytes(SEARCH_BYTES)
        pieces, offset = [], start
        while offset < end:
            data, offset = await store.read(partition, offset, bytes_max=SEARCH_BYTES)
            pieces.append(data)
        found = await store.run_read(_search, pieces, key, start, end)
    progress = partition.groups.get(group)
    return NewestMessage(
        partition_id=partition.partition_id,
        searched_from=start,
        first_offset=first,
        next_offset=end,
        offset=None if found is None else found[0],
        age_ms=0 if found is None else max(0, wall_ms - found[1]),
        tags=() if found is None else found[2],
        acked=None
        if found is None or progress is None or not progress.is_durable
        else found[0] < progress.durable_cursor
        or any(low <= found[0] < high for low, high in progress.durable_ranges),
    )


def _search(
    pieces: list[bytes], key: bytes | None, start: int, end: int
) -> tuple[int, int, tuple[str, ...]] | None:
    """Return the offset, the time of storing and the tags of the newest message in `[start, end)`
    with a key, or with any key if it is None. Blocks.
    """
    for data in reversed(pieces):
        for position, header in reversed(batch_starts(data)):
            batch = column_views(data, header, position)
            keys = batch.key_edges
            for index in reversed(range(header.count)):
                offset = header.base_offset + index
                if not start <= offset < end:
                    continue
                low, high = keys[index], keys[index + 1]
                if key is None or (high - low == len(key) and batch.blob[low:high] == key):
                    low, high = batch.property_edges[index], batch.property_edges[index + 1]
                    return offset, header.appended_at_ms, _tags(bytes(batch.blob[low:high]))
    return None


def _tags(packed_properties: bytes) -> tuple[str, ...]:
    try:
        joined = unpack_properties(packed_properties).get(TAGS_PROPERTY)
    except CorruptBatchError:  # another program wrote them
        return ()
    return tuple(joined.split(",")) if joined and isinstance(joined, str) else ()
