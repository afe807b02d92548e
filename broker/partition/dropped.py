"""Partitions that a broker dropped with their subjects, so that it never hosts their ids again.  Pure.

a call to host one that comes late        is refused
a database that is rebuilt from brokers   gives higher ids, and does not restore the rest of a deleted subject
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence

from ...protocol.offsets import IntervalSet, Range
from .records import DroppedBody

SUBJECTS_MAX = 1_000
"""Deleted subjects that are kept by name; those of older deletions are left out."""
RANGES_MAX = 10_000
"""Ranges of ids in a record."""
KEPT_MAX = 100_000
"""Ranges of ids that are kept apart.  Of subjects that come and go, ids between two dropped ones are other brokers'."""


class DroppedPartitions:
    """The ids of dropped partitions, and the latest deleted subjects."""

    def __init__(self) -> None:
        self._ids = IntervalSet()
        self._pending: dict[int, DroppedBody] = {}
        """Dropped partitions whose record is not durable yet."""
        self._join_above = KEPT_MAX
        """The number of ranges above which the oldest are joined."""
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

    @property
    def too_many(self) -> bool:
        """True if the oldest ranges should be joined."""
        return len(self._ids) > self._join_above

    def join_oldest(self, taken: Iterable[int]) -> None:
        """
        Join the oldest ranges over ids between them, down to KEPT_MAX; such ids are refused as dropped ones are.

        Each of them is older than KEPT_MAX dropped partitions: no call to host it is on its way.

        Args:
            taken: ids that may not be taken for dropped.
        """
        apart = sorted({*taken, *self._pending})
        joined: list[Range] = []
        left = len(self._ids) - KEPT_MAX
        for start, end in self._ids:
            before = joined[-1][1] if joined else start
            if (
                left > 0
                and before < start
                and bisect_left(apart, before) == bisect_left(apart, start)
            ):
                joined[-1] = joined[-1][0], end
                left -= 1
            else:
                joined.append((start, end))
        self._ids = IntervalSet(joined)
        self._join_above = len(joined) + KEPT_MAX // 10  # so that not each further one looks at all

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
