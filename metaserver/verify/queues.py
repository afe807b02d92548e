"""Does a partition of a static subject continue the one before it in its queue, at its end or behind its loss.  Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ...protocol.queues import is_behind_loss
from ...protocol.routing import Partition, PartitionState
from .views import PartitionView


def broken_chain(known: Mapping[int, PartitionView], one: Partition) -> Iterator[str]:
    """Sentences that say where it is not; `known` are all partitions by id."""
    if len(one.parents) > 1:
        yield f"partition {one.partition_id} continues {len(one.parents)} partitions at once"
        return
    start: int | None = 0
    for parent in (known[key] for key in one.parents if key in known):
        before = parent.partition
        place = (before.queue, before.range_start, before.range_end)
        if place != (one.queue, one.range_start, one.range_end):
            yield (
                f"partition {one.partition_id} of queue {one.queue} continues partition "
                f"{before.partition_id}, which has another queue or range"
            )
        gone = parent.forsaken or (
            before.state is PartitionState.EXPIRED and parent.end_offset is None
        )
        if gone and is_behind_loss(one):
            return
        start = None if parent.end_offset is None else before.logic_start + parent.end_offset
    if one.logic_start != start:
        yield (
            f"partition {one.partition_id} begins at logic offset {one.logic_start} of queue "
            f"{one.queue}, and the one before it ends at {start}"
        )
