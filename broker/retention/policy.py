"""Decides which of the oldest segments should be removed, and when messages are refused. Pure.

    older than retention_ms, or the log larger than retention_bytes    remove
    disk 75 % full                             remove segments older than half of retention_ms
    disk 85 % full                             remove the oldest, at any age
    disk 90 % full                             refuse messages until space is free again

    oldest message of the active segment is older than retention_ms / 8
                                               begin a new segment

Invariants
    Sealed segments are removed as a whole, oldest first, but never the active segment. A segment's
    messages are stored within an eighth of retention_ms, unless there are very many segments. So a
    message is removed at most that long after its age has reached retention_ms, even if the broker
    stores no more messages. A message is kept until all consumer groups of its partition have acked
    it, unless the subject's retention is TIME. All messages of a partition are kept until the
    metaserver has sent its groups (`loop.py`).

The limits are those of RocketMQ (75, 85, 90 %; 72 hours), without its daily hour of deletion, and
of QMQ (72 hours).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

EARLY_PERCENT = 75
FORCED_PERCENT = 85
FULL_PERCENT = 90
SEGMENTS_PER_AGE = 8
"""How many segments are begun because of their age within retention_ms."""
SEGMENTS_MAX = 1_000
"""The number of segments above which none is begun because of its age. Segments that a group or a
job needs are kept, and each uses two files.
"""


@dataclass(frozen=True, slots=True)
class SealedSegment:
    """A sealed segment with the positions `[base, end)`. `newest_ms` is the time of its newest
    message, or None if unknown.
    """

    base: int
    end: int
    newest_ms: int | None
    kept_bytes: int = 0
    """The approximate size of the scheduled messages that are written again if it is removed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The log's maximum age and size; 0 means no limit."""

    retention_ms: int
    retention_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskUse:
    """The free and total bytes of a disk."""

    free_bytes: int
    total_bytes: int

    def percent(self, freed_bytes: int = 0) -> int:
        """Return the percentage of the disk that is in use after `freed_bytes` more bytes are
        freed.
        """
        used = self.total_bytes - self.free_bytes - freed_bytes
        return max(used, 0) * 100 // max(self.total_bytes, 1)


def wanted_position(
    segments: Sequence[SealedSegment], limits: Limits, disk: DiskUse, *, end: int, now_ms: int
) -> int:
    """
    Return the log position up to which segments should be removed, or the first base if none should
    be removed. `end` is the end of the log.

    Scheduled messages in them are written again. So unless the segments are old, they are removed
    only if at least half of them is freed, and scheduled messages count twice less towards
    retention_bytes: otherwise the same messages would be written again and again.
    """
    position = segments[0].base if segments else end
    freed_bytes = size_bytes = kept_bytes = 0
    log_bytes_max = limits.retention_bytes + 2 * sum(each.kept_bytes for each in segments)
    for segment in segments:
        age_ms = -1 if segment.newest_ms is None else now_ms - segment.newest_ms
        percent = disk.percent(freed_bytes)
        is_old = 0 < limits.retention_ms <= age_ms
        is_early = percent >= EARLY_PERCENT and 0 < limits.retention_ms <= 2 * age_ms
        is_log_large = limits.retention_bytes > 0 and log_bytes_max < end - segment.base
        if not (is_old or is_early or is_log_large or percent >= FORCED_PERCENT):
            break
        size_bytes += segment.end - segment.base
        kept_bytes += segment.kept_bytes
        freed_bytes = size_bytes - kept_bytes
        if is_old or 2 * kept_bytes <= size_bytes:
            position = segment.end
    return position


def must_begin_segment(
    oldest_ms: int | None, limits: Limits, *, segments: int, now_ms: int
) -> bool:
    """
    Return True if the active segment is old enough that a new one must be started. Retention never
    removes the active segment.

    Args:
        oldest_ms: the time of the active segment's first message; None if it has no message.
        segments: the number of segments, including the active one.
    """
    if oldest_ms is None or not limits.retention_ms or segments > SEGMENTS_MAX:
        return False
    return limits.retention_ms <= SEGMENTS_PER_AGE * (now_ms - oldest_ms)


def earliest_removal_ms(
    stored_ms: int, limits: Limits, disk: DiskUse, *, log_bytes: int, now_ms: int
) -> int | None:
    """Return the earliest time at which a message that was stored at `stored_ms` may be removed
    under the current conditions; None means never.
    """
    percent = disk.percent()
    if percent >= FORCED_PERCENT or 0 < limits.retention_bytes < log_bytes:
        return now_ms
    if not limits.retention_ms:
        return None
    return stored_ms + limits.retention_ms // (2 if percent >= EARLY_PERCENT else 1)


def allowed_position(segments: Sequence[SealedSegment], wanted: int, floor: int | None) -> int:
    """Return `wanted`, lowered to the end of a segment so that everything from `floor` on is kept.
    `floor` is the first position that is still needed; None means that nothing is needed.
    """
    if floor is None or floor >= wanted:
        return wanted
    ends = [segment.end for segment in segments if segment.end <= floor]
    return max(ends, default=segments[0].base)


def reason_to_refuse(disk: DiskUse) -> str:
    """Return the reason why messages must be refused, or "" if they may be accepted."""
    percent = disk.percent()
    if percent < FULL_PERCENT:
        return ""
    return f"the disk is {percent} % full, and {FULL_PERCENT} % is the limit"
