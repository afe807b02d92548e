"""Raises first offsets when retention removes messages, in service and at a start.

    decided ─▶ pending: partition → first offset ─▶ rise, some at a time ─▶ segments removed ─▶ the
        index forgets
                       ▲
           an acquire of the partition meanwhile raises its first offset at once

If a subject's retention is TIME, messages may be removed that a group has not acked. They are
counted for the group, and the count is durable before the segments are removed.

Invariants
    Segments are removed only when the acks that allow it are durable. A group that is registered
    before the decision is taken into account; a group that is registered later begins at the first
    offset that was decided. The beginning of the log determines which messages are removed. A start
    corrects first offsets and the index accordingly.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from ..partition.partition import Group, HostedPartition
from ..partition.state import BrokerState
from ..storage.index.interface import ConsumeQueues


class FirstOffsets:
    """The first offsets of a store; `save` makes a group's progress durable."""

    def __init__(
        self, state: BrokerState, *, save: Callable[[HostedPartition, Group], Awaitable[None]]
    ) -> None:
        self._state = state
        self._save = save
        self.grouped: set[int] = set()
        """The partitions that a consumer group has joined, or was reset in, since this set was last
        emptied.
        """
        self.pending: dict[int, int] = {}
        """Partition id → the first offset that is decided and not raised yet."""
        self.removed: dict[tuple[str, str], tuple[int, int]] = {}
        """(subject, group) → the number of messages removed unread and the number of partitions,
        since this dictionary was last emptied.
        """
        self._unsaved: dict[tuple[int, str], tuple[HostedPartition, Group]] = {}
        """The groups whose progress, or whose count of messages removed unread, may not be durable.
        """

    def rise(self, partition_id: int) -> None:
        """Raise the partition's first offset if a higher one is decided."""
        first = self.pending.pop(partition_id, 0)
        partition = self._state.partitions.get(partition_id) if first else None
        if partition is None or first <= partition.first_offset:
            return
        self._state.touch(partition)
        before, partition.first_offset = partition.first_offset, first
        for group in partition.groups.values():
            unread = group.acked.unacked(before, first)
            group.skip_to(first)
            if group.unsaved:
                self._unsaved[partition_id, group.name] = partition, group
            if unread:
                group.removed_unread += unread
                key = partition.facts.subject, group.name
                messages, partitions = self.removed.get(key, (0, 0))
                self.removed[key] = messages + unread, partitions + 1

    async def saved(self) -> None:
        """
        Wait until the progress of the groups whose messages are removed is durable.

        Raises:
            StorageError, BrokerReadOnlyError: some progress is not durable; the next call tries
                again.
        """
        unsaved = list(self._unsaved.items())
        await asyncio.gather(
            *(self._save(partition, group) for _, (partition, group) in unsaved if group.unsaved)
        )
        for key, _ in unsaved:
            del self._unsaved[key]


def correct_first_offsets(
    state: BrokerState, queues: ConsumeQueues, *, first_position: int
) -> None:
    """
    Raise every first offset to the partition's first message in the log, which begins at
    `first_position`.

    The index must be complete. Blocks.
    """
    for _ in queues.retain(first_position, dropped=state.dropped.durable()):
        pass
    for partition_id in list(state.partitions):
        partition = state.partitions[partition_id]
        bounds = queues.bounds(partition_id)
        first = partition.next_offset if bounds is None else bounds[0]
        if partition.first_offset < first <= partition.next_offset:
            partition.first_offset = first
            state.touch(partition)
    state.retained = first_position
