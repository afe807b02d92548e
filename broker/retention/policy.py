"""Decides which of the oldest segments should be removed, and when writing has to stop. Pure.

    older than retention_ms, or the log larger than retention_bytes    remove
    disk 75 % full                             remove segments older than half of retention_ms
    disk 85 % full                             remove the oldest, at any age
    disk 90 % full                             refuse messages until space is free again

    oldest message of the segment that is being written is older than retention_ms / 8
                                               begin a new segment

Invariants
    Whole sealed segments are removed, oldest first. The segment that is being written stays.
    Messages of one segment are stored within an eighth of retention_ms, unless very many segments
    are kept: so each is removed at most that long after its age, even if the broker stores nothing
    any more. A message stays until every consumer group of its partition has acked it, unless the
    subject's retention is TIME. All messages of a partition stay until the metaserver has sent its
    groups (`loop.py`).

Source: RocketMQ's numbers (75, 85, 90 %; 72 hours), without its hour of the day; QMQ's 72 hours.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

EARLY_PERCENT = 75
FORCED_PERCENT = 85
FULL_PERCENT = 90
SEGMENTS_PER_AGE = 8
"""The number of segments that are begun by age within retention_ms."""
SEGMENTS_MAX = 1_000
"""The number of segments above which none is begun by age: segments that a group or a job needs are
kept, and each takes two files.
"""


@dataclass(frozen=True, slots=True)
class SealedSegment:
    """A sealed segment with the positions `[base, end)`; `newest_ms` is the time of its newest
    message, or None if that is unknown.
    """

    base: int
    end: int
    newest_ms: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits of the log's age and size; 0 means no limit."""

    retention_ms: int
    retention_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskUse:
    """Free and total bytes of the disk."""

    free_bytes: int
    total_bytes: int

    def percent(self, freed: int = 0) -> int:
        """Return the percentage that is in use after `freed` more bytes are freed."""
        used = self.total_bytes - self.free_bytes - freed
        return max(used, 0) * 100 // max(self.total_bytes, 1)


def wanted_position(
    segments: Sequence[SealedSegment], limits: Limits, disk: DiskUse, *, end: int, now_ms: int
) -> int:
    """Return the log position up to which segments should be removed, or the first base if none
    should. `end` is the log's end.
    """
    position = segments[0].base if segments else end
    freed = 0
    for segment in segments:
        aged_ms = -1 if segment.newest_ms is None else now_ms - segment.newest_ms
        percent = disk.percent(freed)
        old = 0 < limits.retention_ms <= aged_ms
        early = percent >= EARLY_PERCENT and 0 < limits.retention_ms <= 2 * aged_ms
        large = 0 < limits.retention_bytes < end - segment.base
        if not (old or early or large or percent >= FORCED_PERCENT):
            break
        position = segment.end
        freed += segment.end - segment.base
    return position


def begins_segment(oldest_ms: int | None, limits: Limits, *, segments: int, now_ms: int) -> bool:
    """
    Return True if a new segment is to be begun, so that messages of the one that is being written
    can be removed by age.

    Args:
        oldest_ms: the time of the first message in the segment that is being written; None if it
            has none.
        segments: the number of segments, including this one.
    """
    if oldest_ms is None or not limits.retention_ms or segments > SEGMENTS_MAX:
        return False
    return limits.retention_ms <= SEGMENTS_PER_AGE * (now_ms - oldest_ms)


def removed_from_ms(
    stored_ms: int, limits: Limits, disk: DiskUse, *, log_bytes: int, now_ms: int
) -> int | None:
    """Return the earliest time at which a message that was stored at `stored_ms` may be removed;
    None means never under the present conditions.
    """
    percent = disk.percent()
    if percent >= FORCED_PERCENT or 0 < limits.retention_bytes < log_bytes:
        return now_ms
    if not limits.retention_ms:
        return None
    return stored_ms + limits.retention_ms // (2 if percent >= EARLY_PERCENT else 1)


def allowed_position(segments: Sequence[SealedSegment], wanted: int, floor: int | None) -> int:
    """Return `wanted`, lowered to the end of the last segment below `floor`, which is the first
    position that a group needs, or None.
    """
    if floor is None or floor >= wanted:
        return wanted
    ends = [segment.end for segment in segments if segment.end <= floor]
    return max(ends, default=segments[0].base)


def reason_to_refuse(disk: DiskUse) -> str:
    """Return why messages must be refused, or "" if they may be accepted."""
    percent = disk.percent()
    if percent < FULL_PERCENT:
        return ""
    return f"the disk is {percent} % full, and {FULL_PERCENT} % is the limit"
