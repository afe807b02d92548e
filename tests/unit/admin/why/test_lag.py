"""Whether a group is stuck."""

from __future__ import annotations

import pytest

from keylane.admin.why.lag import STUCK_MS, is_stuck


@pytest.mark.parametrize(
    ("what", "lag", "falls_per_s", "oldest_ms", "stuck"),
    [
        ("has acked everything", 0, 0.0, 0, False),
        ("is a second behind, under load", 500, 0.0, 1_000, False),
        ("works through a batch of an hour ago", 1_000_000, 2_000.0, 3_600_000, False),
        ("has begun to lag", 500, -500.0, STUCK_MS - 1, False),
        ("acks nothing", 1, 0.0, STUCK_MS, True),
        ("falls further and further behind", 1_000, -5.0, 60_000, True),
    ],
)
def test_group_is_stuck_when_its_oldest_message_waits_and_its_lag_does_not_fall(
    what: str, lag: int, falls_per_s: float, oldest_ms: int, *, stuck: bool
):
    assert is_stuck(lag, falls_per_s=falls_per_s, oldest_ms=oldest_ms) is stuck, what
