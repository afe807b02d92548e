"""Divides ranges among tasks. Small ranges share a task; large ranges are split only on request.
Pure.

    ranges of a lineage:  ▂ ▂ ▂    ▂ ▂    █████████        ▂ ▂
                          └─┬─┘    └┬┘    └───┬───┘         │
    tasks:                  1   …   1         2             3

Invariants
    Every row is in exactly one task; empty ranges are in none.
    Within a task, the rows of a partition are in offset order, after the rows of its parents.
    Without `min_partitions` and `task_bytes`, no partition is split.

Measured overhead: each task costs 32 ms of wall time, regardless of how much it reads
(docs/PERFORMANCE.md).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import groupby, pairwise

from .planner import PlannedRange
from .selection import ReadOptions

TASK_ROWS = 250_000
"""The maximum number of rows of ranges that share a task. Reading them takes ten times as long as
starting a task.
"""
TASK_BYTES = 64 << 20
"""The maximum size of ranges that share a task, so that large messages are spread over several
tasks.
"""

Task = tuple[PlannedRange, ...]


def pack_tasks(ranges: Iterable[PlannedRange], options: ReadOptions) -> list[Task]:
    """Return the ranges of each task, in reading order."""
    non_empty_ranges = sorted((each for each in ranges if each.rows), key=_lineage_order)
    rows, size = _task_limits(non_empty_ranges, options)
    if options.min_partitions is not None or options.task_bytes is not None:
        non_empty_ranges = [
            piece for each in non_empty_ranges for piece in _split(each, rows, size)
        ]
    tasks: list[list[PlannedRange]] = []
    free_rows = free_bytes = 0
    for group in _group_ranges(non_empty_ranges, rows, size, keep_whole=options.ordered):
        group_rows, group_bytes = _total_size(group)
        if not tasks or group_rows > free_rows or group_bytes > free_bytes:
            tasks.append([])
            free_rows, free_bytes = rows, size
        tasks[-1] += group
        free_rows -= group_rows
        free_bytes -= group_bytes
    return [tuple(task) for task in tasks]


def _lineage_order(planned_range: PlannedRange) -> tuple[str, int, int, int, int]:
    return (
        planned_range.subject,
        planned_range.lineage,
        planned_range.epoch,
        planned_range.partition_id,
        planned_range.start,
    )


def _task_limits(ranges: Sequence[PlannedRange], options: ReadOptions) -> tuple[int, int]:
    """Return the maximum number of rows and bytes of a task."""
    rows, size = TASK_ROWS, options.task_bytes or TASK_BYTES
    if options.min_partitions is not None:
        rows = min(rows, max(1, sum(each.rows for each in ranges) // options.min_partitions))
    return rows, size


def _split(planned_range: PlannedRange, rows: int, size: int) -> Iterator[PlannedRange]:
    """Split a range into pieces of about equal size, each within `rows` rows and `size` bytes."""
    pieces = max(-(-planned_range.rows // rows), -(-planned_range.size_bytes // size))
    pieces = min(pieces, planned_range.rows)
    edges = [
        planned_range.start + index * planned_range.rows // pieces for index in range(pieces + 1)
    ]
    for start, end in pairwise(edges):
        yield replace(planned_range, start=start, end=end)


def _group_ranges(
    ranges: Sequence[PlannedRange], rows: int, size: int, *, keep_whole: bool
) -> Iterator[list[PlannedRange]]:
    """Yield groups of ranges that stay in one task: an entire lineage if it fits or `keep_whole` is
    set, otherwise single ranges.
    """
    for _, group in groupby(ranges, key=lambda each: (each.subject, each.lineage)):
        lineage = list(group)
        lineage_rows, lineage_bytes = _total_size(lineage)
        if keep_whole or (lineage_rows <= rows and lineage_bytes <= size):
            yield lineage
        else:
            yield from ([each] for each in lineage)


def _total_size(ranges: Sequence[PlannedRange]) -> tuple[int, int]:
    return sum(each.rows for each in ranges), sum(each.size_bytes for each in ranges)
