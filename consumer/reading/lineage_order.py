"""Decides which partitions a reader may read now: a partition after all its ancestors, so that keys
keep their order. Pure.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from ...protocol.errors import SubjectDeletedError
from ...protocol.operations import PartitionHistory
from ...protocol.routing import PartitionState, logical_partition


class LineageOrder:
    """
    The partitions of a subject that a reader wants, in the order of their lineage.

    Args:
        key: only partitions whose range has, or had, the logical partition of this key; None: all.
        partition: only the partition with this id; None: all.
    """

    def __init__(self, *, key: bytes | None = None, partition: int | None = None) -> None:
        self._logical = None if key is None else logical_partition(key)
        self._partition = partition
        self._parents: dict[int, tuple[int, ...]] = {}
        """The parents of every known partition."""
        self._left: dict[int, PartitionHistory] = {}
        self._waits_for_children: set[int] = set()
        """The partitions that are read to their end, and whose children are not known yet."""

    def learn(self, history: Iterable[PartitionHistory]) -> list[PartitionHistory]:
        """
        Take the partitions that are known now, and return those that can never be read and were not
        known.

        The data of these partitions is gone: expired, or on a disk whose loss was accepted. A known
        partition may have more parents now: rows that replaced messages before it.
        """
        gone = []
        for past in history:
            partition = past.partition
            partition_id = int(partition.partition_id)
            if partition.state is PartitionState.PLANNED or not self.wants(past):
                continue
            is_new = partition_id not in self._parents
            self._parents[partition_id] = tuple(map(int, partition.parents))
            if not is_new:
                continue
            self._waits_for_children.difference_update(partition.parents)
            if past.is_gone:
                gone.append(past)
            else:
                self._left[partition_id] = past
        return gone

    def check_subject(self, subject: str, history: Iterable[PartitionHistory]) -> None:
        """
        Check that a history belongs to the known subject.

        Raises:
            SubjectDeletedError: it belongs to a later subject of the same name: it has none of the
                known partitions, and continues none.
        """
        ids: set[int] = set()
        for past in history:
            ids.update((int(past.partition.partition_id), *map(int, past.partition.parents)))
        if self._parents and ids.isdisjoint(self._parents):
            raise SubjectDeletedError(
                f"subject {subject!r} was deleted, and another one has its name now",
                subject=subject,
            )

    def __contains__(self, partition_id: int) -> bool:
        """Return whether a partition is known and wanted."""
        return partition_id in self._parents

    def wants(self, past: PartitionHistory) -> bool:
        """Return whether a partition may have wanted messages."""
        partition = past.partition
        if self._partition is not None:
            return partition.partition_id == self._partition
        if self._logical is None:
            return True
        return partition.range_start <= self._logical < partition.range_end

    def readable(self) -> list[PartitionHistory]:
        """Return the partitions that may be read now, by id: none of their ancestors, also through
        empty or lost ones, is left to read.
        """
        free = []
        held: set[int] = set()
        """The partitions that are left, and all that continue them."""
        for partition_id, parents in sorted(self._parents.items()):  # parents have lower ids
            waits = not held.isdisjoint(parents)
            if partition_id in self._left:
                held.add(partition_id)
                if not waits:
                    free.append(self._left[partition_id])
            elif waits:
                held.add(partition_id)
        return free

    def finish(self, partition_id: int) -> None:
        """Note that all wanted messages of a partition are read."""
        del self._left[partition_id]
        if not any(partition_id in parents for parents in self._parents.values()):
            self._waits_for_children.add(partition_id)

    @property
    def lacks_children(self) -> bool:
        """Return True if a partition was read to its end, and its children are not known."""
        return bool(self._waits_for_children) and self._partition is None

    @property
    def parents(self) -> Mapping[int, Collection[int]]:
        """Return the partitions that each partition continues, by id, for every known and wanted
        partition.
        """
        return self._parents

    @property
    def left(self) -> frozenset[int]:
        """Return the ids of partitions that are not finished."""
        return frozenset(self._left)
