"""Divides ranges among tasks: small ranges share one, large ranges are cut only on request. Pure.

    ranges of a lineage:  ▂ ▂ ▂    ▂ ▂    █████████        ▂ ▂
                          └─┬─┘    └┬┘    └───┬───┘         │
    tasks:                  1   …   1         2             3

Invariants
    Every row of the ranges is in exactly one task; empty ranges are in none.
    In a task the rows of a partition are in the order of their offsets, after those of its parents.
    Without `min_partitions` and `task_bytes` each partition is in one task.

Source: a task costs 32 ms of wall time, whatever it reads (measured; docs/PERFORMANCE.md).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import groupby, pairwise

from .planner import PlannedRange
from .selection import ReadOptions

TASK_ROWS = 250_000
"""Number of rows up to which small ranges share a task: its own cost is then below a tenth of the
time for reading them.
"""
TASK_BYTES = 64 << 20
"""Number of bytes up to which ranges share a task, so that several tasks read large messages."""

Task = tuple[PlannedRange, ...]


def pack(ranges: Iterable[PlannedRange], options: ReadOptions) -> list[Task]:
    """Return the ranges of each task, in the order of reading."""
    filled = sorted((each for each in ranges if each.rows), key=_in_lineage)
    rows, size = _limits(filled, options)
    if options.min_partitions is not None or options.task_bytes is not None:
        filled = [piece for each in filled for piece in _cut(each, rows, size)]
    tasks: list[list[PlannedRange]] = []
    room_rows = room_bytes = 0
    for unit in _units(filled, rows, size, whole=options.ordered):
        unit_rows, unit_bytes = _size(unit)
        if not tasks or unit_rows > room_rows or unit_bytes > room_bytes:
            tasks.append([])
            room_rows, room_bytes = rows, size
        tasks[-1] += unit
        room_rows -= unit_rows
        room_bytes -= unit_bytes
    return [tuple(task) for task in tasks]


def _in_lineage(planned: PlannedRange) -> tuple[str, int, int, int, int]:
    return (
        planned.subject,
        planned.lineage,
        planned.epoch,
        planned.partition_id,
        planned.start,
    )


def _limits(ranges: Sequence[PlannedRange], options: ReadOptions) -> tuple[int, int]:
    """Return the limits of a task: rows and bytes."""
    rows, size = TASK_ROWS, options.task_bytes or TASK_BYTES
    if options.min_partitions is not None:
        rows = min(rows, max(1, sum(each.rows for each in ranges) // options.min_partitions))
    return rows, size


def _cut(planned: PlannedRange, rows: int, size: int) -> Iterator[PlannedRange]:
    """Cut a range into pieces of about equal size."""
    pieces = max(-(-planned.rows // rows), -(-planned.size_bytes // size))
    pieces = min(pieces, planned.rows)
    edges = [planned.start + index * planned.rows // pieces for index in range(pieces + 1)]
    for start, end in pairwise(edges):
        yield replace(planned, start=start, end=end)


def _units(
    ranges: Sequence[PlannedRange], rows: int, size: int, *, whole: bool
) -> Iterator[list[PlannedRange]]:
    """Yield groups of ranges that stay together in a task: a lineage that fits or has to be
    `whole`, otherwise each range.
    """
    for _, group in groupby(ranges, key=lambda each: (each.subject, each.lineage)):
        lineage = list(group)
        lineage_rows, lineage_bytes = _size(lineage)
        if whole or (lineage_rows <= rows and lineage_bytes <= size):
            yield lineage
        else:
            yield from ([each] for each in lineage)


def _size(ranges: Sequence[PlannedRange]) -> tuple[int, int]:
    return sum(each.rows for each in ranges), sum(each.size_bytes for each in ranges)
