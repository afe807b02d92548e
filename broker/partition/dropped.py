"""Remembers the partitions that a broker has dropped together with their subjects. The broker never
hosts their ids again. Pure.

    a delayed call to host a dropped partition     is refused
    a metaserver database rebuilt from brokers     allocates higher ids, and does not restore the
                                                   remaining partitions of a deleted subject

Subjects may be created and deleted for years, and the ids of one broker are not contiguous. When
there are more than `RANGES_KEPT` ranges, the older ones are merged: an id between two of them that
is not hosted then counts as dropped. A call to host such an id would be so late that thousands of
later ids have been dropped since.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from heapq import merge

from ...protocol.offsets import IntervalSet, Range
from .records import DroppedBody

SUBJECTS_MAX = 1_000
"""The maximum number of deleted subjects that are remembered by name. The latest ones are kept."""
RANGES_MAX = 10_000
"""The maximum number of id ranges in a record."""
RANGES_KEPT = 10_000
"""The number of ranges above which ranges are merged. The half with the highest ids is never
merged.
"""


class DroppedPartitions:
    """The ids of dropped partitions, and the latest deleted subjects."""

    def __init__(self) -> None:
        self._ids = IntervalSet()
        self._pending_bodies: dict[int, DroppedBody] = {}
        """Maps each dropped partition whose record is not durable yet to that record."""
        self._ranges_after_merge = 0
        """The number of ranges after the last merge. It may be high, because hosted partitions may
        separate them.
        """
        self.version = 0
        """Incremented by each durable record."""
        self.subjects: dict[str, int] = {}
        """Maps the name of each deleted subject to its highest partition id. The latest deletion is
        last.
        """

    def __contains__(self, partition_id: object) -> bool:
        assert isinstance(partition_id, int)
        return partition_id in self._pending_bodies or partition_id in self._ids

    def __bool__(self) -> bool:
        return bool(self._pending_bodies or len(self._ids))

    def copy_durable(self) -> DroppedPartitions:
        """Return a copy that has only the durably dropped ids. Data of these partitions may be
        deleted.
        """
        copy = DroppedPartitions()
        copy._ids = IntervalSet(self._ids)
        return copy

    @property
    def highest_id(self) -> int:
        """The highest durable id; 0 if no partition was dropped."""
        return max((end - 1 for _, end in self._ids), default=0)

    def add_pending(self, partition_id: int, body: DroppedBody) -> None:
        """Add a partition whose record is about to be written."""
        self._pending_bodies[partition_id] = body

    def remove_pending(self, partition_id: int) -> None:
        """Undo `add_pending`, because the record could not be written."""
        self._pending_bodies.pop(partition_id, None)

    def add(self, body: DroppedBody) -> None:
        """Apply a durable record."""
        self.version += 1
        for start, end in body.ranges:
            self._ids.add(start, end)
            if end == start + 1:
                self._pending_bodies.pop(start, None)
        for name, last_id in body.subjects.items():
            self.subjects[name] = max(last_id, self.subjects.pop(name, 0))
        while len(self.subjects) > SUBJECTS_MAX:
            del self.subjects[next(iter(self.subjects))]

    @property
    def needs_merge(self) -> bool:
        """True if ranges should be merged with `merge_ranges`."""
        return len(self._ids) > max(RANGES_KEPT, self._ranges_after_merge + RANGES_KEPT // 2)

    def begin_merge(self) -> RangeMerge:
        """
        Begin to merge the ranges with the lower ids. After the merge there are at most
        `RANGES_KEPT` ranges, plus one for each id that separates two ranges.

        Must not be called while the log is replayed, because more partitions may still be hosted.
        """
        return RangeMerge(list(self._ids))

    def merge_ranges(self, range_merge: RangeMerge, kept_ids: Iterable[int]) -> None:
        """
        Merge adjacent ranges that no hosted partition separates.

        Args:
            range_merge: must have been passed every partition that the broker hosted, or might host
                again, when `begin_merge` was called.
            kept_ids: at least the partitions that were added since then, in any order.
        """
        range_merge.keep_apart(kept_ids)
        range_merge.keep_apart(self._pending_bodies)
        merged_ids = IntervalSet()
        for start, end in merge(
            self._ids, range_merge.mergeable_gaps()
        ):  # in order: each is added at the end
            merged_ids.add(start, end)
        self._ids = merged_ids
        self._ranges_after_merge = len(merged_ids)

    def record_bodies(self) -> Iterator[DroppedBody]:
        """Yield records of all ids and subjects, including those whose record is about to be
        written.
        """
        ids, subjects = IntervalSet(self._ids), dict(self.subjects)
        for body in self._pending_bodies.values():
            for start, end in body.ranges:
                ids.add(start, end)
            subjects |= body.subjects
        ranges: Sequence[Range] = list(ids)
        for first in range(0, len(ranges), RANGES_MAX):
            yield DroppedBody(list(ranges[first : first + RANGES_MAX]), {} if first else subjects)


class RangeMerge:
    """Finds the ranges that may be merged. It is given the hosted partitions in chunks, because
    there may be a million.
    """

    def __init__(self, ranges: Sequence[Range]) -> None:
        self._ranges = ranges
        self._starts = [start for start, _ in ranges]
        self._separate = {0, *range(max(0, len(ranges) - RANGES_KEPT // 2), len(ranges))}
        """The indexes of the ranges that are not merged with their predecessors."""

    def keep_apart(self, partition_ids: Iterable[int]) -> None:
        """Keep these ids out of the merged ranges, so that they do not count as dropped."""
        starts = self._starts
        self._separate.update(bisect_right(starts, partition_id) for partition_id in partition_ids)

    def mergeable_gaps(self) -> Iterator[Range]:
        """Yield the gaps before the ranges that may be merged, in order."""
        for index in range(1, len(self._ranges)):
            if index not in self._separate:
                yield self._ranges[index - 1][1], self._starts[index]
