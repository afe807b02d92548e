"""Decides which partition gets the rows of a logical partition first: the oldest one with data.
Pure.

    1 [0, 512) expired ─┐
    2 [512, 1024) ──────┴▶ 3 [0, 1024)        shares: 3 has [0, 512); 2 has [512, 1024), then 3

A share ends wherever the range of an older partition of the subject ends, even if that partition
has expired. So partition 3 always has two shares, and a share has the same rows no matter which
older partitions have expired.

Invariants
    Shares cover each requested logical partition exactly once.
    The shares of a partition only depend on which partitions were planned before it, not on their
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
    """The logical partitions `[start, end)` whose rows go to a partition."""

    partition: Partition
    start: int
    end: int


class KnownRanges:
    """
    The known ranges of all partitions that a subject has ever had.

    A partition in a route may continue partitions that the route no longer lists. Then
    `needs_history` returns True, and the caller fetches the history.
    """

    def __init__(self) -> None:
        self._ranges: dict[int, tuple[int, int]] = {}
        self._not_in_history: set[int] = set()
        """Parents that are missing from the history, such as the parents of a hidden subject's
        partitions.
        """

    def add(self, partitions: Iterable[Partition]) -> None:
        """Add the ranges of partitions, except for planned ones, which may never open."""
        for each in partitions:
            if each.state is not PartitionState.PLANNED:
                self._ranges[int(each.partition_id)] = each.range_start, each.range_end

    def needs_history(self, partitions: Iterable[Partition]) -> bool:
        """Return True if the range of a parent is unknown and may be in the history."""
        return bool(_parents(partitions) - self._ranges.keys() - self._not_in_history)

    def add_history(self, partitions: Collection[Partition], route: Collection[Partition]) -> None:
        """
        Add the ranges of all partitions that the subject has ever had.

        Args:
            partitions: the partitions in the history.
            route: the partitions in the route that was fetched before the history.

        Raises:
            StaleRouteError: the history lacks a partition of the route, so it belongs to a later
                subject with the same name.
        """
        known_ids = {each.partition_id for each in partitions}
        for each in route:
            if each.partition_id not in known_ids:
                raise StaleRouteError(partition_id=each.partition_id)
        self.add(partitions)
        self._not_in_history |= _parents(route) - self._ranges.keys()

    def boundaries(self) -> list[int]:
        """Return, for each logical partition, the lowest id of a partition whose range begins or
        ends there, or `NO_BOUNDARY` if there is none.
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
        after_id: partitions with this id or a lower one are ignored.

    Raises:
        StaleRouteError: a logical partition has no partition, because the route is changing.
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
