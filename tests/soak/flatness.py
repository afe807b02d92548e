"""Whether what a process uses stays the same over hours. Pure, but for the reading of /proc."""

from __future__ import annotations

import os
import statistics
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from typing import NamedTuple

GROWTH_MAX = 0.05
"""How much of its level a figure may grow in an hour, to count as flat."""
SAMPLES_MIN = 10


class Sample(NamedTuple):
    """What a process uses at an instant."""

    at_s: float
    pid: int
    rss_bytes: int
    descriptors: int
    disk_bytes: int


FIGURES = ("rss_bytes", "descriptors", "disk_bytes")


class Trend(NamedTuple):
    """How a figure went over the second half of a run."""

    level: float
    growth_per_hour: float
    """Part of the level by which it grows in an hour; below 0: it shrinks."""

    @property
    def is_flat(self) -> bool:
        return self.growth_per_hour <= GROWTH_MAX


def trend(points: Sequence[tuple[float, float]]) -> Trend:
    """
    Return the median of the slopes between all pairs of points, which a few outliers do not change,
    in relation to the median of the values.

    Args:
        points: seconds and value of each.
    """
    level = statistics.median(value for _, value in points)
    slopes = [
        (later - sooner) / (after_s - before_s)
        for (before_s, sooner), (after_s, later) in combinations(points, 2)
        if after_s > before_s
    ]
    slope = statistics.median(slopes)
    return Trend(level, 3600 * slope / level if level else 0.0)


def trends(samples: Sequence[Sample]) -> dict[str, Trend | None]:
    """
    Return the trend of each figure of a program over the second half of its samples.

    Memory and descriptors of a program that was started again in that half have none: a leak would
    have been ended with its process. Its disk has one.
    """
    half_s = (samples[0].at_s + samples[-1].at_s) / 2 if samples else 0.0
    half = [sample for sample in samples if sample.at_s >= half_s]
    if len(half) < SAMPLES_MIN:
        return dict.fromkeys(FIGURES)
    is_one_process = len({sample.pid for sample in half}) == 1
    return {
        name: trend([(sample.at_s, getattr(sample, name)) for sample in half])
        if is_one_process or name == "disk_bytes"
        else None
        for name in FIGURES
    }


def take_sample(at_s: float, pid: int, folder: Path | None) -> Sample | None:
    """Return what a process uses now; None if it has ended."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        descriptors = len(os.listdir(f"/proc/{pid}/fd"))
    except OSError:
        return None
    rss_bytes = pages * os.sysconf("SC_PAGE_SIZE")
    return Sample(at_s, pid, rss_bytes, descriptors, folder_bytes(folder) if folder else 0)


def folder_bytes(folder: Path) -> int:
    """The bytes of a folder on its disk; files may go meanwhile."""
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_blocks * 512
        except OSError:
            continue
    return total
