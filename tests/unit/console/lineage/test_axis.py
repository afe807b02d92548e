"""The axis of time, and the words on it."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keylane.console.lineage.axis import place_moments, say_span, say_times

NOON_MS = 1_764_504_000_000
S, MIN, H, D = 1_000, 60_000, 3_600_000, 86_400_000


def test_axis_is_to_scale_when_every_span_is_long_enough():
    axis = place_moments([0, 250], 1_000, width=1_000, span_min=100)
    assert axis.places == (0, 250, 1_000)
    assert not axis.widened


def test_short_spans_are_widened_and_the_others_share_the_rest():
    axis = place_moments([0, D, D + MIN, D + 2 * MIN], 4 * D, width=1_000, span_min=100)
    assert axis.places == pytest.approx((0, 200, 300, 400, 1_000), abs=0.3)
    assert axis.widened == {1, 2}


@given(
    st.lists(st.one_of(st.none(), st.integers(0, 10 * D)), min_size=1, max_size=200),
    st.integers(0, D),
)
def test_moments_rise_through_the_whole_axis(times_ms, later_ms):
    """With times that are not known, that are equal, and that are very close."""
    known = iter(sorted(time_ms for time_ms in times_ms if time_ms is not None))
    rising = [None if time_ms is None else next(known) for time_ms in times_ms]
    now_ms = max([0, *(time_ms for time_ms in rising if time_ms is not None)]) + later_ms
    axis = place_moments(rising, now_ms, width=1_000, span_min=100)
    assert len(axis.places) == len(times_ms) + 1
    assert axis.places[0] == 0
    assert axis.places[-1] == pytest.approx(1_000)
    assert all(
        later - place > 0.5 * 1_000 / len(times_ms) * 0.99 or later - place > 99
        for place, later in pairwise(axis.places)
    )


@pytest.mark.parametrize(
    ("times_ms", "words"),
    [
        ([NOON_MS, NOON_MS + H], ["30 Nov, 12:00", "13:00"]),
        ([NOON_MS, NOON_MS + 5 * S], ["30 Nov, 12:00:00", "12:00:05"]),
        ([NOON_MS, None, NOON_MS + D], ["30 Nov, 12:00", "", "1 Dec, 12:00"]),
        ([NOON_MS, NOON_MS + 40 * D], ["30 Nov 2025, 12:00", "9 Jan, 12:00"]),
        ([], []),
    ],
)
def test_times_are_said_as_people_read_them(times_ms, words):
    assert say_times(times_ms) == words


def test_time_beyond_the_calendar_is_said_as_its_end():
    assert say_times([10**18]) == ["31 Dec, 23:59"]


@pytest.mark.parametrize(
    ("span_ms", "words"),
    [
        (None, ""),
        (0, "under 1 s"),
        (S, "1 s"),
        (61 * S, "1 min 1 s"),
        (45 * MIN + S, "45 min"),
        (H, "1 h"),
        (2 * H + 5 * MIN, "2 h 5 min"),
        (3 * D + 4 * H, "3 d 4 h"),
        (400 * D, "400 d"),
    ],
)
def test_span_is_said_in_at_most_two_units(span_ms, words):
    assert say_span(span_ms) == words
