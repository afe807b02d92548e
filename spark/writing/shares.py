"""Which partition gets the rows of each logical partition first: the oldest one with data.  Pure.

    1 [0, 512) expired ─┐
    2 [512, 1024) ──────┴▶ 3 [0, 1024)        shares: 3 has [0, 512), 2 has [512, 1024), and behind 2 comes 3

Invariants
    Shares cover every logical partition that is asked for, once.
    Of one logical partition each partition continues one with a lower id: ids are given when partitions are planned.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from ...protocol.errors import StaleRouteError
from ...protocol.routing import Partition, PartitionState

_WITH_DATA = frozenset({PartitionState.OPEN, PartitionState.SEALED})


class RangeShare(NamedTuple):
    """The logical partitions [start, end) of a partition."""

    partition: Partition
    start: int
    end: int


def oldest_shares(
    partitions: Iterable[Partition], bounds: tuple[int, int], *, behind: int = 0
) -> list[RangeShare]:
    """
    The oldest partition with data of each logical partition in [start, end), by range; neighbours together.

    Args:
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
    shares: list[RangeShare] = []
    for number, partition in enumerate(oldest, start):
        if partition is None:
            raise StaleRouteError(partition_id=behind)
        if shares and shares[-1].partition is partition:
            shares[-1] = shares[-1]._replace(end=number + 1)
        else:
            shares.append(RangeShare(partition, number, number + 1))
    return shares
