"""Which partitions have rows that took the place of messages, and which of these rows a reader needs no more.  Pure.

    P open ─▶ cut: P sealed, C open behind P ─▶ rows made of P, hidden in H ─▶ published: P expired, H between P and C

A reader that was given messages of P is not given the rows that were made of them: they would come again, behind newer
messages of their keys.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from ...protocol.message import Message
from ...protocol.operations import PartitionHistory
from ...protocol.reprocess.sources import source_of


class ReplacingRows:
    """The partitions of rows in a lineage."""

    def __init__(self) -> None:
        self._ids: set[int] = set()

    def learn(self, history: Iterable[PartitionHistory]) -> None:
        """
        Take the partitions that are known now.

        A partition of rows is the only kind of parent that continues another parent of the same child: no other operation
        seals a partition twice.
        """
        parents = {
            int(past.partition.partition_id): frozenset(map(int, past.partition.parents))
            for past in history
        }
        for of_child in parents.values():
            self._ids.update(
                each for each in of_child if not of_child.isdisjoint(parents.get(each, ()))
            )

    def __contains__(self, partition_id: int) -> bool:
        return partition_id in self._ids

    def needs_no(self, row: Message, has_had: Callable[[int, int], bool]) -> bool:
        """
        Whether a message is a row of a message that the reader has had; of a row that does not say what it was made of: no.

        Args:
            has_had: of a partition id and an offset.
        """
        if row.partition_id not in self._ids:
            return False
        source = source_of(row)
        return source is not None and has_had(*source)
