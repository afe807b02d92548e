"""
Tracks which partitions contain rows that replaced messages, and which rows a reader has already
read as messages. Pure.

P open ─▶ cut: P sealed, C open after P ─▶ rows made from P, hidden in H ─▶ published: P expired,
    H between P and C

A reader that has read messages of P skips the rows made from them: otherwise it would read them
again, after newer messages of their keys. If a later publication replaces H before the reader has
seen it, the new rows derive from rows of H, and their original sources are unknown. A reader that
has read all of P skips these rows; one that has read only part of P gets all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from ...protocol.message import Message
from ...protocol.operations import PartitionHistory
from ...protocol.reprocess.manifest import parse_source
from ...protocol.reprocess.replaced import replaced_by_rows

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
