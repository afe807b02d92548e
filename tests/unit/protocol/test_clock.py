"""Waits that end together: never late, early by less than a tick, and short ones at their own
time.
"""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from keylane.protocol.clock import ALIGNED_S_MIN, TICK_S, round_to_tick

NOW_S = st.floats(0, 1e6)


@given(NOW_S, st.floats(ALIGNED_S_MIN, 600))
def test_long_wait_ends_at_a_tick_and_not_late(now_s, wait_s):
    end_s = round_to_tick(wait_s, now_s)
    assert now_s + wait_s - TICK_S < end_s <= now_s + wait_s
    assert end_s % TICK_S == 0


@given(NOW_S, st.floats(0, ALIGNED_S_MIN, exclude_max=True))
def test_short_wait_ends_at_its_own_time(now_s, wait_s):
    assert round_to_tick(wait_s, now_s) == now_s + wait_s


def test_waits_that_begin_at_different_times_end_together():
    assert {round_to_tick(30.0, 100.0 + part / 50) for part in range(12)} == {130.0}
