"""The error for requested rows that retention has already removed. Pure."""

from __future__ import annotations

from ..protocol.errors import DataLossError
from ..protocol.reading.bounds import PartitionBounds
from ..protocol.text import counted, format_time


def loss_error(subject: str, bounds: PartitionBounds, start: int, end: int) -> DataLossError:
    """
    Return the error for the lost offsets `[start, end)`.

    Args:
        bounds: the current bounds of the partition.
    """
    rows = end - start
    removed = "them"
    if bounds.first_at_ms is not None:
        removed = f"messages that were stored before {format_time(bounds.first_at_ms)}"
    text = (
        f"partition {bounds.partition_id} of subject {subject} has lost [{start}, {end}), "
        f"{counted(rows, 'row')}: retention has removed {removed}"
    )
    return DataLossError(
        f"{text}; it now begins at {bounds.first_offset}",
        partition_id=bounds.partition_id,
        subject=subject,
        offset=start,
        lost_until=end,
        rows=rows,
        stored_before_ms=bounds.first_at_ms,
        first_offset=bounds.first_offset,
        next_offset=bounds.next_offset,
    )
