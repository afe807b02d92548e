"""Runs of offsets: what is added and removed is told, at the front, in the middle and at the
end.
"""

from __future__ import annotations

import pytest

from keylane.broker.partition.offset_ranges import COMPACT_MIN_ROWS, OffsetRanges


def test_added_offsets_are_told_once():
    runs = OffsetRanges([(2, 4), (6, 8)])
    assert runs.add(3, 7) == [(4, 6)]
    assert list(runs) == [(2, 8)]
    assert runs.add(2, 8) == []
    assert runs.add(0, 10) == [(0, 2), (8, 10)]
    assert (runs.messages, runs.range_count, runs.first) == (10, 1, 0)


def test_ranges_that_touch_are_joined():
    runs = OffsetRanges([(0, 1), (1, 2), (4, 5), (2, 4)])
    assert list(runs) == [(0, 5)]


def test_removed_offsets_are_told():
    runs = OffsetRanges([(0, 4), (6, 10), (12, 14)])
    assert runs.remove(2, 8) == [(2, 4), (6, 8)]
    assert list(runs) == [(0, 2), (8, 10), (12, 14)]
    assert runs.remove(2, 8) == []
    assert runs.remove(9, 100) == [(9, 10), (12, 14)]
    assert (list(runs), runs.messages) == ([(0, 2), (8, 9)], 3)


def test_range_is_split_when_its_middle_is_removed():
    runs = OffsetRanges([(0, 9), (20, 30)])
    assert runs.remove(3, 5) == [(3, 5)]
    assert list(runs) == [(0, 3), (5, 9), (20, 30)]


def test_arrays_shrink_when_they_are_taken_at_the_front():
    count = 4 * COMPACT_MIN_ROWS
    runs = OffsetRanges((2 * number, 2 * number + 1) for number in range(count))
    for number in range(count):
        assert runs.remove(2 * number, 2 * number + 1) == [(2 * number, 2 * number + 1)]
        assert len(runs._starts) <= max(2 * COMPACT_MIN_ROWS, 2 * (count - number) + 2)
    assert not runs
    assert (runs.messages, list(runs)) == (0, [])


def test_offsets_below_the_head_can_be_added_again():
    runs = OffsetRanges((2 * number, 2 * number + 1) for number in range(8))
    for number in range(5):
        runs.remove(2 * number, 2 * number + 1)
    assert runs.add(0, 1) == [(0, 1)]
    assert runs.add(3, 4) == [(3, 4)]
    assert list(runs) == [(0, 1), (3, 4), (10, 11), (12, 13), (14, 15)]


def test_some_ranges_are_given_from_a_place_on():
    runs = OffsetRanges([(0, 1), (2, 3), (4, 5), (6, 7)])
    runs.remove(0, 1)
    assert list(runs.page(1, 1)) == [(4, 5)]
    assert list(runs.page(0, 1 << 62)) == [(2, 3), (4, 5), (6, 7)]
    assert runs.intersection(0, 5) == [(2, 3), (4, 5)]
    assert runs.intersection(5, 6) == []


def test_packed_ranges_read_back():
    runs = OffsetRanges([(0, 1), (2, 3), (9, 2**62)])
    runs.remove(0, 1)
    again = OffsetRanges.from_packed(*runs.pack())
    assert (list(again), again.messages) == (list(runs), runs.messages)


@pytest.mark.parametrize("packed", [(b"1234567", b"1234567"), (bytes(8), bytes(16))])
def test_bytes_that_are_no_ranges_are_refused(packed: tuple[bytes, bytes]):
    with pytest.raises(ValueError, match="bytes"):
        OffsetRanges.from_packed(*packed)
