"""The lineage of a subject as a reader has it: which partitions it may read now, and which rows it
has already read as messages. Pure.

A partition is read only after its ancestors, so that every key stays in order.

P open ─▶ cut: P sealed, C open after P ─▶ rows made from P, hidden in H ─▶ published: P expired,
    H between P and C

A reader that has read messages of P skips the rows made from them: otherwise it would read them
again, after newer messages of their keys. If a later publication replaces H before the reader has
seen it, the new rows derive from rows of H, and their original sources are unknown. A reader that
has read all of P skips these rows; one that has read only part of P gets all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from ...protocol.errors import SubjectDeletedError
from ...protocol.message import Message
from ...protocol.operations import PartitionHistory
from ...protocol.reprocess.manifest import parse_source
from ...protocol.reprocess.replaced import replaced_by_rows
from ...protocol.routing import PartitionState, logical_partition

WasRead = Callable[[int, int, int], bool]
"""A callable (partition id, start, end) that returns True if the reader has read all messages in
`[start, end)`.
"""


class ReplacingRows:
    """The partitions of a lineage that contain replacement rows."""

    __slots__ = ("_history", "ids")

    def __init__(self) -> None:
        self.ids: set[int] = set()
        """The ids of these partitions. This is always the same set object, so that the common case
        without such rows needs no call per message.
        """
        self._history: dict[int, PartitionHistory] = {}
        """Every partition, by id; empty if there are no such rows."""

    def update(self, history: Iterable[PartitionHistory]) -> None:
        """Apply the subject's current partitions."""
        by_id = {int(entry.partition.partition_id): entry for entry in history}
        parents = {partition_id: entry.partition.parents for partition_id, entry in by_id.items()}
        self.ids.update(replaced_by_rows(parents))
        if self.ids:
            self._history = by_id

    def is_source_read(self, row: Message[Any], was_read: WasRead) -> bool:
        """Return True if a message is a row whose source the reader has read, or False if the row
        does not name its source.
        """
        if row.partition_id not in self.ids:
            return False
        source = parse_source(row)
        if source is None:
            return False
        partition_id, offset = source
        return was_read(partition_id, offset, offset + 1) or (
            partition_id in self.ids & self._history.keys()
            and self._are_sources_read(partition_id, was_read)
        )

    def _are_sources_read(self, partition_id: int, was_read: WasRead) -> bool:
        """Return True if the reader has read all sources of a partition's rows, including those
        reached through rows made from rows and through empty partitions.
        """
        pending, seen = [partition_id], {partition_id}
        while pending:
            partition_id = pending.pop()
            entry = self._history[partition_id]
            end = entry.end_offset
            is_empty_root = end == 0 and not entry.partition.parents
            if is_empty_root or (end and was_read(partition_id, 0, end)):
                continue
            parents = {int(parent) for parent in entry.partition.parents} & self._history.keys()
            if not parents or (partition_id not in self.ids and end != 0):
                return False
            pending += parents - seen
            seen |= parents
        return True


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
