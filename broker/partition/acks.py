"""Applies acks to a consumer group's progress on a partition. Pure.

Invariants
    Only ranges of stored messages are acked. All ranges of a request are acked, or none.
    The cursor never falls, and never passes a message that is not acked. Only an operator's reset
    may set it to any offset (`store/group_changes.py`).
"""

from __future__ import annotations

from collections.abc import Sequence

from ...protocol.errors import InvalidRequestError, OverloadedError
from ...protocol.limits import ACK_RANGES_MAX
from ...protocol.offsets import AckedOffsets, Range


def decide_ack(acked: AckedOffsets, ranges: Sequence[Range], *, next_offset: int) -> None:
    """
    Check the ranges of an ack.

    Raises:
        InvalidRequestError: a range is empty, reversed, or not within `[0, next_offset)`.
        OverloadedError: the group would have more than ACK_RANGES_MAX ranges above the cursor.
    """
    for start, end in ranges:
        if not 0 <= start < end <= next_offset:
            raise InvalidRequestError(
                f"cannot ack [{start}, {end}): stored are [0, {next_offset})",
                next_offset=next_offset,
            )
    if acked.range_count + len(ranges) > ACK_RANGES_MAX:
        trial = AckedOffsets(acked.cursor, acked.ranges)
        for start, end in ranges:
            trial.add(start, end)
        if trial.range_count > ACK_RANGES_MAX:
            raise OverloadedError(
                f"more than {ACK_RANGES_MAX} acked ranges above the cursor", cursor=acked.cursor
            )


def apply_ack(acked: AckedOffsets, ranges: Sequence[Range]) -> bool:
    """Mark the ranges as acked. Return True if one of their offsets was not acked before."""
    new = False
    for start, end in ranges:
        new |= acked.add(start, end)
    return new
