"""Acks of all partitions of an event loop are sent at the same times; `test_pull_client.py` has the rest."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keylane.consumer.pulling.ack_sender import linger_s


@given(st.floats(0.001, 10), st.floats(0, 10_000_000))
def test_linger_is_never_longer_than_it_may_be(longest_s, now_s):
    assert 0 < linger_s(longest_s, now_s) <= longest_s


@given(st.integers(1, 10_000), st.integers(0, 1_000_000), st.integers(0, 999))
def test_lingers_that_begin_between_two_multiples_end_together(longest_ms, multiple, part):
    """Two partitions whose messages are handled at different times of it send their acks in one turn."""
    longest_s = longest_ms / 1000
    begin_s = (multiple + 0.1) * longest_s
    later_s = begin_s + 0.8 * longest_s * part / 1000
    first, second = (now_s + linger_s(longest_s, now_s) for now_s in (begin_s, later_s))
    assert first == pytest.approx(second, abs=longest_s / 1000)


def test_no_linger_stays_none():
    assert linger_s(0, 12.5) == 0
