"""Partitions that a broker dropped with their subjects, so that it never hosts their ids again.  Pure.

a call to host one that comes late        is refused
a database that is rebuilt from brokers   gives higher ids, and does not restore the rest of a deleted subject
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ...protocol.offsets import IntervalSet, Range
from .records import DroppedBody

SUBJECTS_MAX = 1_000
"""Deleted subjects that are kept by name; those of older deletions are left out."""
RANGES_MAX = 10_000
"""Ranges of ids in a record."""


class DroppedPartitions:
    """The ids of dropped partitions, and the latest deleted subjects."""

    def __init__(self) -> None:
        self._ids = IntervalSet()
        self._pending: dict[int, DroppedBody] = {}
        """Dropped partitions whose record is not durable yet."""
        self.version = 0
        """Rises with each durable record."""
        self.subjects: dict[str, int] = {}
        """Name of a deleted subject → its highest partition id; the latest deletion is last."""

    def __contains__(self, partition_id: object) -> bool:
        assert isinstance(partition_id, int)
        return partition_id in self._pending or partition_id in self._ids

    def __bool__(self) -> bool:
        return bool(self._pending or len(self._ids))

    def durable(self) -> DroppedPartitions:
        """A copy of the ids whose records are durable: what is deleted for them is never needed again."""
        copy = DroppedPartitions()
        copy._ids = IntervalSet(self._ids)
        return copy

    @property
    def highest_id(self) -> int:
        """The highest durable id; 0 if none was dropped."""
        return max((end - 1 for _, end in self._ids), default=0)

    def begin(self, partition_id: int, body: DroppedBody) -> None:
        """Note a partition whose record is about to be written."""
        self._pending[partition_id] = body

    def undo(self, partition_id: int) -> None:
        """Note that the record could not be written."""
        self._pending.pop(partition_id, None)

    def add(self, body: DroppedBody) -> None:
        """Note a durable record."""
        self.version += 1
        for start, end in body.ranges:
            self._ids.add(start, end)
            if end == start + 1:
                self._pending.pop(start, None)
        for name, last_id in body.subjects.items():
            self.subjects[name] = max(last_id, self.subjects.pop(name, 0))
        while len(self.subjects) > SUBJECTS_MAX:
            del self.subjects[next(iter(self.subjects))]

    def bodies(self) -> Iterator[DroppedBody]:
        """Records of everything, with what is about to be written."""
        ids, subjects = IntervalSet(self._ids), dict(self.subjects)
        for body in self._pending.values():
            for start, end in body.ranges:
                ids.add(start, end)
            subjects |= body.subjects
        ranges: Sequence[Range] = list(ids)
        for first in range(0, len(ranges), RANGES_MAX):
            yield DroppedBody(list(ranges[first : first + RANGES_MAX]), {} if first else subjects)
