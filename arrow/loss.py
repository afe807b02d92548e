"""Rows that were asked for and that retention has removed: which, how many, and since when.
Pure.
"""

from __future__ import annotations

from ..protocol.errors import DataLossError
from ..protocol.reading.bounds import PartitionBounds
from ..protocol.scheduled.deliver_at import shown
from ..protocol.text import counted


def loss_error(subject: str, now: PartitionBounds, start: int, end: int) -> DataLossError:
    """
    The error of the lost offsets `[start, end)`.

    Args:
        now: the bounds that the partition has now.
    """
    rows = end - start
    before = "" if now.first_at_ms is None else f" what was stored before {shown(now.first_at_ms)}"
    text = (
        f"partition {now.partition_id} of subject {subject} has lost [{start}, {end}), "
        f"{counted(rows, 'row')}: retention has removed{before or ' them'}"
    )
    return DataLossError(
        f"{text}; it begins at {now.first_offset} now",
        partition_id=now.partition_id,
        subject=subject,
        offset=start,
        lost_until=end,
        rows=rows,
        stored_before_ms=now.first_at_ms,
        first_offset=now.first_offset,
        next_offset=now.next_offset,
    )
