"""ScheduledMessage before the next try stay within their bounds."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from keylane.protocol.backoff import Backoff


@given(
    st.integers(1, 10_000),
    st.integers(1, 600_000),
    st.floats(1.0, 10.0),
    st.integers(1, 2**40),
    st.integers(0, 2**32),
)
@settings(deadline=None)
def test_wait_is_between_half_a_step_and_the_whole(first_ms, max_ms, factor, attempt, seed):
    """The wait is at least half of its step and at least 1 ms, and never above the step or the
    limit.
    """
    backoff = Backoff(first_ms=first_ms, max_ms=max_ms, factor=factor)
    step = min(max_ms, first_ms * factor ** min(attempt - 1, 32))
    wait = backoff.wait_ms(attempt, random.Random(seed))
    assert 1 <= wait <= max_ms
    assert int(step / 2) <= wait <= max(1, step)


@given(st.lists(st.sampled_from(["next_pause_ms", "skip", "reset"])), st.integers(0, 2**32))
def test_pauses_follow_the_failures_in_a_row(steps, seed):
    """Each pause is that of its number among the failures since the last success, with one draw for
    each.
    """
    backoff = Backoff(first_ms=10, max_ms=900)
    pauses, rng = backoff.pauses(random.Random(seed)), random.Random(seed)
    failures = 0
    for step in steps:
        failures = 0 if step == "reset" else failures + 1
        expected = backoff.wait_ms(failures, rng) if step == "next_pause_ms" else None
        assert getattr(pauses, step)() == expected
        assert pauses.failures == failures


def test_same_rng_give_the_same_waits():
    """Nothing but the generator passed in decides: a simulation can replay it."""
    first, again = random.Random(7), random.Random(7)
    waits = [Backoff().wait_ms(attempt, first) for attempt in range(1, 50)]
    assert waits == [Backoff().wait_ms(attempt, again) for attempt in range(1, 50)]
    assert waits[-1] > 1_000
