"""Builds the error that reports requested rows which retention has removed. Pure."""

from __future__ import annotations

from ..protocol.errors import DataLossError
from ..protocol.reading.bounds import PartitionBounds
from ..protocol.scheduled.deliver_at import shown
from ..protocol.text import counted


def loss_error(subject: str, now: PartitionBounds, start: int, end: int) -> DataLossError:
    """
    Return the error of the lost offsets `[start, end)`.

    Args:
        now: the present bounds of the partition.
    """
    rows = end - start
    stored = "them"
    if now.first_at_ms is not None:
        stored = f"messages that were stored before {shown(now.first_at_ms)}"
    text = (
        f"partition {now.partition_id} of subject {subject} has lost [{start}, {end}), "
        f"{counted(rows, 'row')}: retention has removed {stored}"
    )
    return DataLossError(
        f"{text}; it now begins at {now.first_offset}",
        partition_id=now.partition_id,
        subject=subject,
        offset=start,
        lost_until=end,
        rows=rows,
        stored_before_ms=now.first_at_ms,
        first_offset=now.first_offset,
        next_offset=now.next_offset,
    )
