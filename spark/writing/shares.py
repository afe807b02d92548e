"""Decides which partition first gets the rows of a logical partition: the oldest with data. Pure.

    1 [0, 512) expired ─┐
    2 [512, 1024) ──────┴▶ 3 [0, 1024)        shares: 3 has [0, 512); 2 has [512, 1024), then 3

A share ends where the range of any older partition of the subject ends, even of an expired one. So
partition 3 always has two shares, and a share has the same rows whichever older partitions have
expired.

Invariants
    Shares cover each requested logical partition once.
    The shares of a partition depend only on which partitions were planned before it, not on their
    states.
    A partition has a higher id than its parents, because ids are assigned when partitions are
    planned.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import NamedTuple

from ...protocol.errors import StaleRouteError
from ...protocol.limits import LOGICAL_PARTITIONS
from ...protocol.routing import Partition, PartitionState

NO_BOUNDARY = 1 << 63
_WITH_DATA = frozenset({PartitionState.OPEN, PartitionState.SEALED})


class RangeShare(NamedTuple):
    """The logical partitions `[start, end)` of a partition."""

    partition: Partition
    start: int
    end: int


class KnownRanges:
    """
    The known ranges of the partitions that a subject has ever had.

    A partition of a route may continue partitions that the route no longer lists; then
    `needs_history` returns True, and the caller reads the history.
    """

    def __init__(self) -> None:
        self._ranges: dict[int, tuple[int, int]] = {}
        self._not_in_history: set[int] = set()
        """Parents that the history lacks, such as the parents of a hidden subject's partitions."""

    def add(self, partitions: Iterable[Partition]) -> None:
        """Add the ranges of partitions, except planned ones, which may never open."""
        for each in partitions:
            if each.state is not PartitionState.PLANNED:
                self._ranges[int(each.partition_id)] = each.range_start, each.range_end

    def needs_history(self, partitions: Iterable[Partition]) -> bool:
        """Return True if the range of a parent is unknown, and the history may have it."""
        return bool(_parents(partitions) - self._ranges.keys() - self._not_in_history)

    def add_history(self, partitions: Collection[Partition], route: Collection[Partition]) -> None:
        """
        Add the ranges of all partitions that the subject has ever had.

        Args:
            partitions: the partitions of the history.
            route: the partitions of the route that was read before the history.

        Raises:
            StaleRouteError: the history lacks a partition of the route, so it belongs to a later
                subject of the same name.
        """
        known_ids = {each.partition_id for each in partitions}
        for each in route:
            if each.partition_id not in known_ids:
                raise StaleRouteError(partition_id=each.partition_id)
        self.add(partitions)
        self._not_in_history |= _parents(route) - self._ranges.keys()

    def boundaries(self) -> list[int]:
        """Return, for each logical partition, the lowest id of a partition whose range begins or
        ends there; `NO_BOUNDARY` if there is none.
        """
        lowest = [NO_BOUNDARY] * (LOGICAL_PARTITIONS + 1)
        for partition_id, edges in self._ranges.items():
            for edge in edges:
                lowest[edge] = min(lowest[edge], partition_id)
        return lowest


def oldest_shares(
    partitions: Iterable[Partition],
    bounds: tuple[int, int],
    *,
    known_ranges: KnownRanges,
    after_id: int = 0,
) -> list[RangeShare]:
    """
    Return the oldest partition with data for each logical partition in `bounds`, as ranges that
    are cut where the ranges of older partitions begin and end.

    Args:
        known_ranges: the ranges of all ancestors of these partitions.
        after_id: partitions with this or a lower id are ignored.

    Raises:
        StaleRouteError: no partition has a logical partition, because the route is changing.
    """
    start, end = bounds
    oldest: list[Partition | None] = [None] * (end - start)
    candidates = [each for each in partitions if each.partition_id > after_id]
    for each in sorted(candidates, key=lambda each: -each.partition_id):
        low_bound, high_bound = max(start, each.range_start), min(end, each.range_end)
        if each.state in _WITH_DATA and low_bound < high_bound:
            oldest[low_bound - start : high_bound - start] = [each] * (high_bound - low_bound)
    boundaries = known_ranges.boundaries()
    shares: list[RangeShare] = []
    for number, partition in enumerate(oldest, start):
        if partition is None:
            raise StaleRouteError(partition_id=after_id)
        is_same_partition = shares and shares[-1].partition is partition
        if is_same_partition and boundaries[number] >= partition.partition_id:
            shares[-1] = shares[-1]._replace(end=number + 1)
        else:
            shares.append(RangeShare(partition, number, number + 1))
    return shares


def _parents(partitions: Iterable[Partition]) -> set[int]:
    return {int(parent) for each in partitions for parent in each.parents}
