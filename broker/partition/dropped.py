"""The partitions that a broker dropped with their subjects, so that it never hosts their ids again.
Pure.

a late call to host such a partition      is refused
a database that is rebuilt from brokers   gives higher ids, and does not restore the rest of a
                                          deleted subject

Subjects may be created and deleted for years, and their ids lie between those of other brokers.
Beyond `RANGES_KEPT` ranges, the older ones are therefore joined: an id between two of them that is
not hosted counts as dropped. A call to host such an id would be so late that thousands of later ids
were dropped here meanwhile.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from heapq import merge

from ...protocol.offsets import IntervalSet, Range
from .records import DroppedBody

SUBJECTS_MAX = 1_000
"""The number of deleted subjects that are kept by name. Those that were deleted earlier are left
out.
"""
RANGES_MAX = 10_000
"""The most ranges of ids in a record."""
RANGES_KEPT = 10_000
"""The number of ranges of ids that are kept apart. Half of them, those with the highest ids, stay
apart when the others are joined.
"""


class DroppedPartitions:
    """The ids of dropped partitions, and the latest deleted subjects."""

    def __init__(self) -> None:
        self._ids = IntervalSet()
        self._pending: dict[int, DroppedBody] = {}
        """Partition id → its record, for dropped partitions whose record is not durable yet."""
        self._ranges_joined = 0
        """The number of ranges that remained after the last join; hosted partitions keep them
        apart.
        """
        self.version = 0
        """The version, which rises with each durable record."""
        self.subjects: dict[str, int] = {}
        """Name of a deleted subject → its highest partition id; the latest deletion is last."""

    def __contains__(self, partition_id: object) -> bool:
        assert isinstance(partition_id, int)
        return partition_id in self._pending or partition_id in self._ids

    def __bool__(self) -> bool:
        return bool(self._pending or len(self._ids))

    def durable(self) -> DroppedPartitions:
        """Return a copy of the ids whose records are durable. Whatever is deleted because of them
        is never needed again.
        """
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
        """True if there are more ranges than are kept apart; `join` makes them fewer."""
        return len(self._ids) > max(RANGES_KEPT, self._ranges_joined + RANGES_KEPT // 2)

    def joining(self) -> Joining:
        """
        Begin to join ranges with lower ids. Afterwards there are at most `RANGES_KEPT`, and one for
        each id that keeps two apart.

        It must not be called while the log is replayed: the log may host a partition that is not
        yet here.
        """
        return Joining(list(self._ids))

    def join(self, joining: Joining, others: Iterable[int]) -> None:
        """
        Join the ranges that nothing keeps apart.

        Args:
            joining: has been passed every partition that the broker had, or might have again, when
                the join was begun.
            others: at least the partitions that were added since, in any order.
        """
        joining.keep_apart(others)
        joining.keep_apart(self._pending)
        joined = IntervalSet()
        for start, end in merge(self._ids, joining.gaps()):  # in order: each is added at the end
            joined.add(start, end)
        self._ids = joined
        self._ranges_joined = len(joined)

    def bodies(self) -> Iterator[DroppedBody]:
        """Yield records of everything, including what is about to be written."""
        ids, subjects = IntervalSet(self._ids), dict(self.subjects)
        for body in self._pending.values():
            for start, end in body.ranges:
                ids.add(start, end)
            subjects |= body.subjects
        ranges: Sequence[Range] = list(ids)
        for first in range(0, len(ranges), RANGES_MAX):
            yield DroppedBody(list(ranges[first : first + RANGES_MAX]), {} if first else subjects)


class Joining:
    """Finds which ranges may be joined, looking at a portion of the hosted partitions at a time,
    because there may be a million.
    """

    def __init__(self, ranges: Sequence[Range]) -> None:
        self._ranges = ranges
        self._starts = [start for start, _ in ranges]
        self._apart = {0, *range(max(0, len(ranges) - RANGES_KEPT // 2), len(ranges))}
        """The indexes of ranges that are not joined with the previous one."""

    def keep_apart(self, numbers: Iterable[int]) -> None:
        """Do not count any of these ids as dropped."""
        starts = self._starts
        self._apart.update(bisect_right(starts, number) for number in numbers)

    def gaps(self) -> Iterator[Range]:
        """Yield the gap between each two ranges that may be joined, in order."""
        for number in range(1, len(self._ranges)):
            if number not in self._apart:
                yield self._ranges[number - 1][1], self._starts[number]
