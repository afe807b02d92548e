"""What a reader of ranges is asked to read, checked.  Pure."""

from __future__ import annotations

from dataclasses import dataclass

from ..protocol.ids import Subject
from .schema import COLUMNS

BATCH_ROWS_DEFAULT = 16_384
"""From 10,000 rows on, the cost of a batch itself no longer shows; see docs/PERFORMANCE.md."""

Bound = str | dict[int, int]
"""earliest, latest, or partition id → offset; a partition not named there keeps the default."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadOptions:
    """What to read, checked."""

    meta: tuple[str, ...]
    subject: Subject
    partitions: frozenset[int] | None = None
    """None: all that have data."""
    start: Bound = "earliest"
    end: Bound = "latest"
    columns: tuple[str, ...] = COLUMNS
    batch_rows: int = BATCH_ROWS_DEFAULT
    gc_freeze: bool = True
