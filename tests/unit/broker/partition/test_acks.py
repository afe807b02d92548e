"""Acks: all ranges of a request or none, never beyond what is stored, never without a limit."""

from __future__ import annotations

import pytest

from keylane.broker.partition.acks import apply_ack, decide_ack
from keylane.protocol.errors import InvalidRequestError, OverloadedError
from keylane.protocol.limits import ACK_RANGES_MAX
from keylane.protocol.offsets import AckedOffsets


@pytest.mark.parametrize("bad", [(3, 3), (4, 3), (-1, 2), (5, 11), (0, 2**70)])
def test_bad_range_refuses_the_whole_ack(bad):
    """One range that is empty, reversed or beyond the stored messages refuses the request."""
    with pytest.raises(InvalidRequestError):
        decide_ack(AckedOffsets(), [(0, 1), bad], next_offset=10)


def test_ranges_above_the_cursor_are_limited():
    """An ack that leaves more ranges than are kept is refused; one that closes gaps is not."""
    acked = AckedOffsets()
    for index in range(ACK_RANGES_MAX):
        acked.add(2 * index + 1, 2 * index + 2)
    end = 4 * ACK_RANGES_MAX

    with pytest.raises(OverloadedError):
        decide_ack(acked, [(end - 1, end)], next_offset=end)
    decide_ack(acked, [(0, 1)], next_offset=end)
    assert apply_ack(acked, [(0, 1), (2, 3)])
    assert acked.cursor == 4


def test_ack_said_twice_changes_nothing():
    """Acking what is acked tells that nothing was new."""
    acked = AckedOffsets()
    assert apply_ack(acked, [(0, 3), (5, 7)])
    assert not apply_ack(acked, [(1, 2), (5, 7)])
