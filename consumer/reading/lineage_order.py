"""Decides which partitions a reader may read now: each one only after its ancestors, so that every
key stays in order. Pure.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from ...protocol.errors import SubjectDeletedError
from ...protocol.operations import PartitionHistory
from ...protocol.routing import PartitionState, logical_partition


class LineageOrder:
    """
    The partitions of a subject that a reader wants, in lineage order.

    Args:
        key: only partitions whose range contains this key's logical partition are read; None: all.
        partition: only the partition with this id is read; None: all.
    """

    def __init__(self, *, key: bytes | None = None, partition: int | None = None) -> None:
        self._logical_partition = None if key is None else logical_partition(key)
        self._partition = partition
        self._parents: dict[int, tuple[int, ...]] = {}
        """The parents of every known partition, by id."""
        self._unread: dict[int, PartitionHistory] = {}
        self._without_children: set[int] = set()
        """The partitions that are read to their end but whose children are not known yet."""

    def update(self, history: Iterable[PartitionHistory]) -> list[PartitionHistory]:
        """
        Merge the subject's current partitions, and return the new ones that can never be read.

        Their data has expired, or was on a disk whose loss was accepted. A known partition may
        acquire more parents, which contain rows that replaced earlier messages.
        """
        unreadable = []
        for entry in history:
            partition = entry.partition
            partition_id = int(partition.partition_id)
            if partition.state is PartitionState.PLANNED or not self.is_wanted(entry):
                continue
            is_new = partition_id not in self._parents
            self._parents[partition_id] = tuple(map(int, partition.parents))
            if not is_new:
                continue
            self._without_children.difference_update(partition.parents)
            if entry.is_gone:
                unreadable.append(entry)
            else:
                self._unread[partition_id] = entry
        return unreadable

    def check_subject(self, subject: str, history: Iterable[PartitionHistory]) -> None:
        """
        Check that a history belongs to the subject that is already known.

        Raises:
            SubjectDeletedError: the history belongs to a later subject of the same name, because
                none of its partitions is known or continues a known one.
        """
        ids: set[int] = set()
        for entry in history:
            ids.update((int(entry.partition.partition_id), *map(int, entry.partition.parents)))
        if self._parents and ids.isdisjoint(self._parents):
            raise SubjectDeletedError(
                f"subject {subject!r} was deleted, and another subject has its name now",
                subject=subject,
            )

    def __contains__(self, partition_id: int) -> bool:
        """Return True if the partition is known and wanted."""
        return partition_id in self._parents

    def is_wanted(self, entry: PartitionHistory) -> bool:
        """Return True if the partition may have wanted messages."""
        partition = entry.partition
        if self._partition is not None:
            return partition.partition_id == self._partition
        if self._logical_partition is None:
            return True
        return partition.range_start <= self._logical_partition < partition.range_end

    def readable(self) -> list[PartitionHistory]:
        """Return the partitions that may be read now because they have no unread ancestors, sorted
        by id.
        """
        readable = []
        blocked: set[int] = set()
        """The unread partitions and all their descendants."""
        for partition_id, parents in sorted(self._parents.items()):  # parents have lower ids
            is_blocked = not blocked.isdisjoint(parents)
            if partition_id in self._unread:
                blocked.add(partition_id)
                if not is_blocked:
                    readable.append(self._unread[partition_id])
            elif is_blocked:
                blocked.add(partition_id)
        return readable

    def finish(self, partition_id: int) -> None:
        """Record that all wanted messages of a partition are read."""
        del self._unread[partition_id]
        if not any(partition_id in parents for parents in self._parents.values()):
            self._without_children.add(partition_id)

    @property
    def lacks_children(self) -> bool:
        """True if a partition is read to its end but its children are not known yet."""
        return bool(self._without_children) and self._partition is None

    @property
    def parents(self) -> Mapping[int, Collection[int]]:
        """The parents of every known and wanted partition, by id."""
        return self._parents

    @property
    def unread_ids(self) -> frozenset[int]:
        """The ids of the partitions that are not read to their end."""
        return frozenset(self._unread)
