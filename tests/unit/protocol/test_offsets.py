"""Acked offsets: what is refused, and the edges of ranges."""

from __future__ import annotations

import pytest

from keylane.protocol.errors import InvalidRequestError
from keylane.protocol.ids import MAX_I64
from keylane.protocol.offsets import AckedOffsets


@pytest.mark.parametrize("edges", [(-1, 1), (0, 0), (5, 5), (5, 4), (0, MAX_I64 + 1), (-3, -1)])
def test_add_changes_nothing_when_its_edges_are_no_range(edges):
    """Empty, reversed, negative and too high ranges are refused."""
    acked = AckedOffsets(3, [(5, 7)])
    with pytest.raises(InvalidRequestError):
        acked.add(*edges)
    assert (acked.cursor, acked.ranges) == (3, [(5, 7)])


def test_add_joins_ranges_when_they_touch():
    """Ranges that touch or overlap are kept as one, and the cursor swallows what it reaches."""
    acked = AckedOffsets()
    assert acked.add(5, 7)
    assert acked.add(9, 11)
    assert acked.add(7, 9)
    assert acked.ranges == [(5, 11)]
    assert not acked.add(6, 10)
    assert acked.add(3, 12)
    assert acked.ranges == [(3, 12)]
    assert acked.add(0, 3)
    assert (acked.cursor, acked.ranges) == (12, [])
    assert not acked.add(0, 12)


def test_cursor_never_falls():
    """Acks below the cursor are no news."""
    acked = AckedOffsets(10)
    assert not acked.add(0, 10)
    assert acked.cursor == 10
    assert 9 in acked
    assert 10 not in acked
