"""When each partition took the messages of its logical partitions: the bands of the picture. Pure.

Invariants
    No two bands have a logical partition in common at any moment, whatever the history says.
    A band ends where another one begins on any of its logical partitions.

Moments are counted rather than timed, because times may be unknown, or wrong after a jump of the
calendar: a parent always begins before its child.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from ...protocol.limits import LOGICAL_PARTITIONS
from ...protocol.operations import PartitionHistory
from ...protocol.routing import Partition, PartitionState

BANDS_MAX = 2_048
"""The number of bands above which the oldest are left out."""
MOMENTS_MAX = 200
"""The largest number of moments; the oldest are left out."""


@dataclass(frozen=True, slots=True)
class Band:
    """A partition that took messages in the moments `[start, end)`, which are indexes of
    `Bands.times_ms`.
    """

    entry: PartitionHistory
    start: int
    end: int | None
    """None if it is open, or if nothing continues it."""

    @property
    def partition(self) -> Partition:
        """The partition."""
        return self.entry.partition


@dataclass(frozen=True, slots=True)
class Bands:
    """All bands, in the order in which they begin."""

    times_ms: tuple[int | None, ...]
    """The time of each moment at which bands begin, in milliseconds since 1970; None if it is not
    known.
    """
    bands: tuple[Band, ...]
    earlier: int = 0
    """The number of older partitions that are left out."""

    def by_moment(self) -> list[tuple[list[Band], list[Band]]]:
        """Return the bands that begin at each moment, and those that end there."""
        moments: list[tuple[list[Band], list[Band]]] = [([], []) for _ in self.times_ms]
        for band in self.bands:
            moments[band.start][0].append(band)
            if band.end is not None:
                moments[band.end][1].append(band)
        return moments


_Key = tuple[int, int]
"""The last time that is known, in milliseconds since 1970, or -1, and a number of later steps."""


def lay_out_bands(history: Iterable[PartitionHistory]) -> Bands:
    """Lay the partitions of a subject out, except planned ones. Partitions that are opened together
    begin at one moment.
    """
    opened = [entry for entry in history if entry.partition.state is not PartitionState.PLANNED]
    starts: dict[int, _Key] = {}
    ends: dict[int, _Key] = {}
    newest = [-1] * LOGICAL_PARTITIONS
    """The id of the last partition so far, by logical partition."""
    for family in _families(opened):
        for together in _without_overlaps(family):
            continued: set[int] = set()
            start: _Key = (-1, 0)
            for entry in together:
                low, high = entry.partition.range_start, entry.partition.range_end
                continued.update(newest[low:high])
                newest[low:high] = [entry.partition.partition_id] * (high - low)
                if entry.opened_ms is not None:
                    start = max(start, (entry.opened_ms, 0))
            for number in continued - {-1}:
                time_ms, steps = starts[number]
                start = max(start, (time_ms, steps + 1))
            ends |= {number: min(ends.get(number, start), start) for number in continued}
            starts |= {entry.partition.partition_id: start for entry in together}
    moments = sorted(set(starts.values()))
    index_of = {moment: index for index, moment in enumerate(moments)}
    bands = []
    for entry in opened:
        end = ends.get(entry.partition.partition_id)
        start_index = index_of[starts[entry.partition.partition_id]]
        bands.append(Band(entry, start_index, None if end is None else index_of[end]))
    bands.sort(key=lambda band: (band.start, band.partition.range_start))
    return _keep_latest(
        bands, [None if steps or time_ms < 0 else time_ms for time_ms, steps in moments]
    )


def _keep_latest(bands: Sequence[Band], times_ms: Sequence[int | None]) -> Bands:
    """Leave the oldest moments out, so that BANDS_MAX and MOMENTS_MAX are kept. A band that lasts
    beyond the first moment that is left begins there.
    """
    first = max(0, len(times_ms) - MOMENTS_MAX)
    if len(bands) > BANDS_MAX:
        ends = sorted((band.end for band in bands if band.end is not None), reverse=True)
        room = BANDS_MAX - sum(band.end is None for band in bands)
        if room < len(ends):
            first = max(first, min(ends[max(room, 0)], len(times_ms) - 1))
    kept = [
        Band(band.entry, max(band.start - first, 0), None if band.end is None else band.end - first)
        for band in bands
        if band.end is None or band.end > first
    ]
    return Bands(tuple(times_ms[first:]), tuple(kept), len(bands) - len(kept))


def _without_overlaps(family: Sequence[PartitionHistory]) -> Iterator[list[PartitionHistory]]:
    """Yield all partitions of a family at once, unless the database is damaged and some overlap."""
    while family:
        together, others, taken = [], [], bytearray(LOGICAL_PARTITIONS)
        for entry in family:
            low, high = entry.partition.range_start, entry.partition.range_end
            if any(taken[low:high]):
                others.append(entry)
            else:
                together.append(entry)
                taken[low:high] = b"1" * (high - low)
        yield together
        family = others


def _families(entries: Sequence[PartitionHistory]) -> Iterator[list[PartitionHistory]]:
    """Yield partitions after their parents, those with a common parent together, and otherwise in
    the order of their times and ids.
    """
    by_id = {int(entry.partition.partition_id): entry for entry in entries}
    families = {number: [number] for number in by_id}
    children: dict[int, list[int]] = {}
    for number, entry in by_id.items():
        for parent in by_id.keys() & entry.partition.parents:
            children.setdefault(int(parent), []).append(number)
    for siblings in children.values():
        family = families[siblings[0]]
        for number in siblings[1:]:
            if (other := families[number]) is not family:
                family += other
                families.update(dict.fromkeys(other, family))

    ranks: dict[int, tuple[int, int]] = {}
    waits_for: dict[tuple[int, int], set[int]] = {}
    for family in {id(family): family for family in families.values()}.values():
        rank = max(by_id[number].opened_ms or -1 for number in family), min(family)
        ranks |= dict.fromkeys(family, rank)
        parents = {int(parent) for number in family for parent in by_id[number].partition.parents}
        waits_for[rank] = parents & by_id.keys()
    ready = sorted(rank for rank, parents in waits_for.items() if not parents)
    while waits_for:
        # Only a damaged database has partitions that are their own ancestors.
        rank = heapq.heappop(ready) if ready else min(waits_for)
        if waits_for.pop(rank, None) is None:
            continue
        family = sorted(families[rank[1]])
        yield [by_id[number] for number in family]
        for following in {ranks[child] for number in family for child in children.get(number, ())}:
            if following in waits_for:
                waits_for[following].difference_update(family)
                if not waits_for[following]:
                    heapq.heappush(ready, following)
