"""First offsets rise when retention removes what lies before them: in service, and after a start that finds less log.

    decided ─▶ pending: partition → first offset ─▶ rise, some at a time ─▶ the segments go ─▶ the index forgets
                       ▲
           who acquires a partition meanwhile has it rise at once

Invariants
    A group is registered before the decision, and is looked at, or finds the first offset that was decided.
    The beginning of the log says what is gone; first offsets and index are mended by it at the next start.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from .partition import Group, HostedPartition
from .state import BrokerState
from .storage.consume_queue import ConsumeQueues

log = logging.getLogger("keylane.broker")


class FirstOffsets:
    """The first offsets of a store; `save` makes a group's progress durable."""

    def __init__(
        self, state: BrokerState, *, save: Callable[[HostedPartition, Group], object]
    ) -> None:
        self._state = state
        self._save = save
        self.grouped: set[int] = set()
        """Partitions where a consumer group came, or was set back, since this was emptied."""
        self.pending: dict[int, int] = {}
        """What is decided and has not risen yet."""

    def rise(self, partition_id: int) -> None:
        """Carry out what is decided for a partition, if anything is."""
        first = self.pending.pop(partition_id, 0)
        partition = self._state.partitions.get(partition_id) if first else None
        if partition is None or first <= partition.first_offset:
            return
        self._state.touch(partition)
        partition.first_offset = first
        for group in partition.groups.values():
            cursor = group.acked.cursor
            if group.skip_to(first):
                # Time alone counts for this subject.
                log.warning(
                    "partition %d: group %s has missed offsets %d to %d",
                    partition_id, group.name, cursor, first,
                )  # fmt: skip
                self._save(partition, group)


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
    state.retained = first_position
