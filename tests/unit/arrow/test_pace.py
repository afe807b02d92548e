"""A reader receives its bytes evenly, and never more than its limit."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from keylane.arrow.pace import ANSWER_BYTES_MIN, Pace
from keylane.protocol.limits import PULL_BYTES_MAX


@given(
    st.integers(1, 10**9),
    st.lists(st.tuples(st.integers(1, PULL_BYTES_MAX), st.floats(0, 5)), min_size=1, max_size=50),
)
def test_pace_gives_at_most_its_bytes_a_second_and_one_answer(bytes_per_second, answers):
    """For any sizes and pauses, the bytes received before a read fit the time that has passed."""
    pace, now_s, total, last = Pace(bytes_per_second), 0.0, 0, 0
    for count, pause_s in answers:
        now_s += pace.wait_s(now_s)
        assert total - last <= bytes_per_second * now_s * (1 + 1e-6) + 1
        pace.record_received(count, now_s)
        total, last = total + count, count
        now_s += pause_s


def test_pace_asks_for_small_answers_when_it_is_slow():
    """Four answers a second, of a useful size."""
    assert Pace(1_000).bytes_max == ANSWER_BYTES_MIN
    assert Pace(1 << 20).bytes_max == 256 << 10
    assert Pace(1 << 40).bytes_max == PULL_BYTES_MAX


def test_pace_without_limit_never_waits():
    """Without a limit, answers are as large as possible, and there are no pauses."""
    pace = Pace(None)
    pace.record_received(PULL_BYTES_MAX, 5.0)
    assert pace.wait_s(5.0) == 0
    assert pace.bytes_max == PULL_BYTES_MAX
