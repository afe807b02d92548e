"""Jumps of a database's clock are detected; slow replies and drift do not count as jumps."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keylane.metaserver.sql.clock_watch import DRIFT_SHARE, TOLERANCE_MS, ClockReading, ClockWatch

HOUR_MS = 3_600_000


@pytest.mark.parametrize("by_ms", [HOUR_MS, -HOUR_MS, 500, -500])
def test_jump_is_reported_until_restart(by_ms: int) -> None:
    """Each reading reports it, so that a jump that was not handled is not forgotten."""
    watch = ClockWatch()
    assert watch.jump_ms(ClockReading(0, 1_000_000, 0)) == 0
    for passed_ms in (500, 600):
        told_ms = 1_000_000 + passed_ms + by_ms
        assert watch.jump_ms(ClockReading(passed_ms, told_ms, passed_ms)) == by_ms
    watch.restart()
    assert watch.jump_ms(ClockReading(700, 1_000_700 + by_ms, 700)) == 0
    assert watch.jump_ms(ClockReading(800, 1_000_800 + by_ms, 800)) == 0


def test_slow_answer_counts_as_jump_only_beyond_its_round_trip() -> None:
    """The clock was read at some moment of the wait."""
    watch = ClockWatch()
    assert watch.jump_ms(ClockReading(0, 0, 0)) == 0
    assert watch.jump_ms(ClockReading(100, 5_000, 5_100)) == 0
    watch = ClockWatch()
    assert watch.jump_ms(ClockReading(0, 0, 0)) == 0
    assert watch.jump_ms(ClockReading(100, 9_100, 5_100)) == 4_000


def test_older_reading_is_ignored_when_it_arrives_later() -> None:
    """Concurrent transactions end in any order."""
    watch = ClockWatch()
    assert watch.jump_ms(ClockReading(1_000, 1_000, 1_001)) == 0
    assert watch.jump_ms(ClockReading(900, 900, 901)) == 0
    assert watch.jump_ms(ClockReading(1_100, 1_100 + TOLERANCE_MS + 11, 1_100)) > 0


@given(
    pauses=st.lists(st.integers(0, HOUR_MS), max_size=20),
    waits=st.lists(st.tuples(st.integers(0, 5_000), st.integers(0, 5_000)), min_size=21),
    drift=st.floats(1 - 0.9 / DRIFT_SHARE, 1 + 0.9 / DRIFT_SHARE),
)
def test_waits_and_drift_are_no_jumps(
    pauses: list[int], waits: list[tuple[int, int]], drift: float
) -> None:
    """Any round trip, and any slew by a time server."""
    watch, boot_ms = ClockWatch(), 0
    for pause_ms, (before_ms, after_ms) in zip([0, *pauses], waits, strict=False):
        boot_ms += pause_ms
        told_ms = round((boot_ms + before_ms) * drift)
        assert watch.jump_ms(ClockReading(boot_ms, told_ms, boot_ms + before_ms + after_ms)) == 0
        boot_ms += before_ms + after_ms
