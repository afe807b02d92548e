"""Which partition gets the rows of each logical partition first: the oldest one with data.  Pure.

    1 [0, 512) expired ─┐
    2 [512, 1024) ──────┴▶ 3 [0, 1024)        shares: 3 has [0, 512), 2 has [512, 1024), and behind 2 comes 3

A share ends where the range of any older partition of the subject ends, an expired one too.  So 3
always has two shares, and the rows of a share are the same whichever of the partitions before it
have expired.

Invariants
    Shares cover every logical partition that is asked for, once.
    The shares of a partition follow from the partitions that were planned before it, and from no
    state. Of one logical partition each partition continues one with a lower id: ids are given when
    partitions are planned.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import NamedTuple

from ...protocol.errors import StaleRouteError
from ...protocol.limits import LOGICAL_PARTITIONS
from ...protocol.routing import Partition, PartitionState

NO_BORDER = 1 << 63
_WITH_DATA = frozenset({PartitionState.OPEN, PartitionState.SEALED})


class RangeShare(NamedTuple):
    """The logical partitions [start, end) of a partition."""

    partition: Partition
    start: int
    end: int


class PastRanges:
    """
    The ranges of the partitions that a subject ever had, as far as they are known.

    A partition of a route may continue some that the route no longer has: `lacks` says whether to
    ask for the history.
    """

    def __init__(self) -> None:
        self._ranges: dict[int, tuple[int, int]] = {}
        self._untold: set[int] = set()
        """Partitions that the history did not have, such as those that a hidden subject
        continues.
        """

    def learn(self, partitions: Iterable[Partition]) -> None:
        """Note the ranges of partitions; one that is only planned may never open."""
        for each in partitions:
            if each.state is not PartitionState.PLANNED:
                self._ranges[int(each.partition_id)] = each.range_start, each.range_end

    def lacks(self, partitions: Iterable[Partition]) -> bool:
        """Whether partitions continue one whose range is not known, and may be told."""
        return bool(_parents(partitions) - self._ranges.keys() - self._untold)

    def learn_history(
        self, partitions: Collection[Partition], route: Collection[Partition]
    ) -> None:
        """
        Note the ranges of all partitions that the subject ever had.

        Args:
            route: partitions of the subject before the history was asked for.

        Raises:
            StaleRouteError: the history lacks one of them: it is of another subject of the name.
        """
        told = {each.partition_id for each in partitions}
        for each in route:
            if each.partition_id not in told:
                raise StaleRouteError(partition_id=each.partition_id)
        self.learn(partitions)
        self._untold |= _parents(route) - self._ranges.keys()

    def borders(self) -> list[int]:
        """Of each logical partition the lowest id of the partitions whose range begins or ends
        there; `NO_BORDER` without one.
        """
        lowest = [NO_BORDER] * (LOGICAL_PARTITIONS + 1)
        for partition_id, edges in self._ranges.items():
            for edge in edges:
                lowest[edge] = min(lowest[edge], partition_id)
        return lowest


def oldest_shares(
    partitions: Iterable[Partition],
    bounds: tuple[int, int],
    *,
    past: PastRanges,
    behind: int = 0,
) -> list[RangeShare]:
    """
    The oldest partition with data of each logical partition in [start, end), by range, cut where
    older ranges begin and end.

    Args:
        past: the ranges of all partitions that these ones continue.
        behind: only partitions with ids above this one.

    Raises:
        StaleRouteError: a logical partition has none: the route is about to change.
    """
    start, end = bounds
    oldest: list[Partition | None] = [None] * (end - start)
    younger = [each for each in partitions if each.partition_id > behind]
    for each in sorted(younger, key=lambda each: -each.partition_id):
        low, high = max(start, each.range_start), min(end, each.range_end)
        if each.state in _WITH_DATA and low < high:
            oldest[low - start : high - start] = [each] * (high - low)
    borders = past.borders()
    shares: list[RangeShare] = []
    for number, partition in enumerate(oldest, start):
        if partition is None:
            raise StaleRouteError(partition_id=behind)
        whole = shares and shares[-1].partition is partition
        if whole and borders[number] >= partition.partition_id:
            shares[-1] = shares[-1]._replace(end=number + 1)
        else:
            shares.append(RangeShare(partition, number, number + 1))
    return shares


def _parents(partitions: Iterable[Partition]) -> set[int]:
    return {int(parent) for each in partitions for parent in each.parents}
