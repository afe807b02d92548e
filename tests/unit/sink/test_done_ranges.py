"""Ranges of offsets whose effects are done."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from keylane.sink.done_ranges import Merge, offsets_outside, plan_merges, ranges_of

OFFSETS = st.sets(st.integers(0, 40)).map(sorted)


@given(OFFSETS, OFFSETS)
def test_offsets_are_left_when_no_range_has_them(done, asked):
    assert offsets_outside(ranges_of(done), asked) == sorted(set(asked) - set(done))


@given(OFFSETS)
def test_ranges_contain_exactly_the_offsets(offsets):
    ranges = ranges_of(offsets)
    assert [offset for first, end in ranges for offset in range(first, end)] == offsets
    assert plan_merges(ranges) == []


@given(OFFSETS)
def test_merges_leave_no_adjacent_rows(offsets):
    rows = [(offset, offset + 1) for offset in offsets]
    merges = plan_merges(rows)
    kept = {
        first: end
        for first, end in rows
        if not any(merge.first_offset < first < merge.next_offset for merge in merges)
    }
    kept |= {merge.first_offset: merge.next_offset for merge in merges}
    assert sorted(kept.items()) == ranges_of(offsets)


def test_merge_names_the_first_row_and_the_end():
    assert plan_merges([(0, 2), (2, 3), (4, 5), (6, 7), (7, 9)]) == [Merge(0, 3), Merge(6, 9)]
