"""Every duration is in exactly one bucket, and the buckets add up."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from keylane.rpc.operating.histogram import Histogram


@given(st.lists(st.integers(min_value=-5, max_value=10**11)))
def test_histogram_counts_each_duration_up_to_its_bound(durations):
    """The counts equal those made by hand; the sum ignores negative durations."""
    histogram = Histogram((0.001, 0.5, 2.0))
    for duration in durations:
        histogram.observe(duration)
    bounds = {"0.001": 10**6, "0.5": 5 * 10**8, "2": 2 * 10**9, "+Inf": 10**12}
    assert histogram.cumulative() == [
        (name, sum(duration <= bound for duration in durations)) for name, bound in bounds.items()
    ]
    assert histogram.count == len(durations)
    assert histogram.sum_ns == sum(max(0, duration) for duration in durations)
