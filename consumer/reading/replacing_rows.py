"""Tracks which partitions have rows that replaced messages, and which of these rows a reader no
longer needs. Pure.

    P open ─▶ cut: P sealed, C open after P ─▶ rows made of P, hidden in H ─▶ published: P expired,
        H between P and C

A reader that was given messages of P is not given the rows that were made of them: they would be
read again, after newer messages of their keys. A later publication may replace the rows of H
before the reader has learnt of H: its rows are made of rows. A reader that had all of P needs none
of these, and one that had a part of P gets them all, because their first sources are no longer
known.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from ...protocol.message import Message
from ...protocol.operations import PartitionHistory
from ...protocol.reprocess.manifest import source_of
from ...protocol.reprocess.replaced import replaced_by_rows

Had = Callable[[int, int, int], bool]
"""A callable, by a partition id and offsets `[start, end)`, for whether a reader has had all of
these messages.
"""


class ReplacingRows:
    """The partitions of rows in a lineage."""

    __slots__ = ("_history", "ids")

    def __init__(self) -> None:
        self.ids: set[int] = set()
        """The ids of partitions of rows, always the same set, so that a check of each message costs
        no call where there are none.
        """
        self._history: dict[int, PartitionHistory] = {}
        """Every partition by id; empty without rows."""

    def learn(self, history: Iterable[PartitionHistory]) -> None:
        """Take the partitions that are known now."""
        by_id = {int(past.partition.partition_id): past for past in history}
        parents = {number: past.partition.parents for number, past in by_id.items()}
        self.ids.update(replaced_by_rows(parents))
        if self.ids:
            self._history = by_id

    def needs_no(self, row: Message[Any], had: Had) -> bool:
        """Return whether a message is a row made from a message that the reader has had; False for
        a row that does not name its source.
        """
        if row.partition_id not in self.ids:
            return False
        source = source_of(row)
        if source is None:
            return False
        partition_id, offset = source
        return had(partition_id, offset, offset + 1) or (
            partition_id in self.ids & self._history.keys() and self._is_behind(partition_id, had)
        )

    def _is_behind(self, partition_id: int, had: Had) -> bool:
        """Return whether a reader has had all sources of the rows of a partition, through rows of
        rows and empty partitions.
        """
        waits, seen = [partition_id], {partition_id}
        while waits:
            number = waits.pop()
            past = self._history[number]
            end = past.end_offset
            if end and had(number, 0, end):
                continue
            parents = {int(parent) for parent in past.partition.parents} & self._history.keys()
            if not parents or (number not in self.ids and end != 0):
                return False
            waits += parents - seen
            seen |= parents
        return True
