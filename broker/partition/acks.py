"""Applies acks to a consumer group's progress on a partition. Pure.

Invariants
    Only stored messages are acked. A request acks either all of its ranges or none.
    The cursor never falls, and never passes an unacked message. Only an operator's reset may set
    it to another offset (`store/group_changes.py`).
"""

from __future__ import annotations

from collections.abc import Sequence

from ...protocol.errors import InvalidRequestError, OverloadedError
from ...protocol.limits import ACK_RANGES_MAX
from ...protocol.offsets import AckedOffsets, Range


def decide_ack(acked: AckedOffsets, ranges: Sequence[Range], *, next_offset: int) -> None:
    """
    Check whether the ranges of an ack can be applied.

    Raises:
        InvalidRequestError: a range is empty, reversed, or not within `[0, next_offset)`.
        OverloadedError: the group would have more than ACK_RANGES_MAX ranges above the cursor.
    """
    for start, end in ranges:
        if not 0 <= start < end <= next_offset:
            raise InvalidRequestError(
                f"cannot ack [{start}, {end}): only [0, {next_offset}) is stored",
                next_offset=next_offset,
            )
    if acked.range_count + len(ranges) > ACK_RANGES_MAX:
        result = AckedOffsets(acked.cursor, acked.ranges)
        for start, end in ranges:
            result.add(start, end)
        if result.range_count > ACK_RANGES_MAX:
            raise OverloadedError(
                f"more than {ACK_RANGES_MAX} acked ranges above the cursor", cursor=acked.cursor
            )


def apply_ack(acked: AckedOffsets, ranges: Sequence[Range]) -> bool:
    """Mark the ranges as acked. Return True if an offset was acked that had not been acked
    before.
    """
    has_changed = False
    for start, end in ranges:
        has_changed |= acked.add(start, end)
    return has_changed
