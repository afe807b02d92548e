"""First offsets after a start: what retention removed before the broker stopped is told to the state again."""

from __future__ import annotations

from .state import BrokerState
from .storage.consume_queue import ConsumeQueues


def correct_first_offsets(
    state: BrokerState, queues: ConsumeQueues, *, first_position: int
) -> None:
    """
    Raise every first offset to the first message that the log still has, `first_position` being its beginning.

    Blocks; the index is complete.
    """
    for _ in queues.retain(first_position):
        pass
    for partition_id in list(state.partitions):
        partition = state.partitions[partition_id]
        bounds = queues.bounds(partition_id)
        first = partition.next_offset if bounds is None else bounds[0]
        if partition.first_offset < first <= partition.next_offset:
            partition.first_offset = first
            state.touch(partition)
