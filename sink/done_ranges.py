"""Finds offsets whose effects are not done, and plans merges of the ranges whose effects are.
Pure.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ..protocol.offsets import Range


def offsets_outside(ranges: Sequence[Range], offsets: Iterable[int]) -> list[int]:
    """Return the `offsets` that lie outside all `ranges`, which are half-open, disjoint and
    sorted.
    """
    firsts = [first for first, _ in ranges]
    pending = []
    for offset in offsets:
        index = bisect_right(firsts, offset) - 1
        if index < 0 or offset >= ranges[index][1]:
            pending.append(offset)
    return pending


def ranges_of(offsets: Iterable[int]) -> list[Range]:
    """Return half-open ranges that contain exactly the sorted, distinct `offsets`."""
    ranges: list[Range] = []
    for offset in offsets:
        if ranges and ranges[-1][1] == offset:
            ranges[-1] = (ranges[-1][0], offset + 1)
        else:
            ranges.append((offset, offset + 1))
    return ranges


@dataclass(frozen=True, slots=True)
class Merge:
    """A merge of rows: extend the row at `first_offset` to `next_offset`, and delete the rows in
    between.
    """

    first_offset: int
    next_offset: int


def plan_merges(ranges: Sequence[Range]) -> list[Merge]:
    """Return the merges that join all adjacent `ranges`, which are half-open, disjoint and
    sorted.
    """
    merges: list[Merge] = []
    first_index = 0
    for index, (_, end) in enumerate(ranges):
        if index + 1 < len(ranges) and ranges[index + 1][0] == end:
            continue
        if index > first_index:
            merges.append(Merge(ranges[first_index][0], end))
        first_index = index + 1
    return merges
