"""Times of delivery: as datetime, number and text, rounded up, and refused with advice."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta, timezone

import pandas as pd
import pytest

from keylane.protocol.errors import Reason
from keylane.protocol.scheduled.deliver_at import AHEAD_MS_MAX, deliver_at_ms, read_deliver_at
from support.raising import raises

NOW_MS = 1_800_000_000_000
NOW = datetime.fromtimestamp(NOW_MS / 1000, UTC)


@pytest.mark.parametrize(
    ("given", "ms"),
    [
        (NOW + timedelta(seconds=5), NOW_MS + 5_000),
        (NOW + timedelta(microseconds=1), NOW_MS + 1),
        ((NOW + timedelta(hours=1)).astimezone(timezone(timedelta(hours=9))), NOW_MS + 3_600_000),
        (NOW_MS + 1, NOW_MS + 1),
        (NOW_MS + AHEAD_MS_MAX, NOW_MS + AHEAD_MS_MAX),
    ],
)
def test_time_is_milliseconds_and_never_earlier_than_given(given, ms):
    assert deliver_at_ms(given, now_ms=NOW_MS) == ms


@pytest.mark.parametrize(
    "text",
    [
        "1800000060000",
        "2027-01-15T08:01:00Z",
        "2027-01-15T09:01:00+01:00",
        "2027-01-15T09:01:00 01:00",  # the plus sign of a URL
    ],
)
def test_text_is_read_as_the_time_it_says(text):
    assert read_deliver_at(text, now_ms=NOW_MS) == NOW_MS + 60_000


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (NOW, "has passed: 2027-01-15T08:00:00.000\\+00:00"),
        (NOW_MS, "has passed"),
        (-(10**30), "has passed"),
        (1_800_000_001, "milliseconds are needed"),
        (pd.NaT, "is not a time: NaT"),
        (NOW.replace(tzinfo=None), "no time zone: 2027-01-15T08:00:00"),
        (NOW_MS + AHEAD_MS_MAX + 1, "over 366 days ahead"),
        (10**30, "over 366 days ahead"),
        (None, "not NoneType"),
        (1.8e12, "not float"),
        (True, "not bool"),
    ],
)
def test_impossible_time_is_refused(given, said):
    with raises(Reason.DELIVER_AT, match=said) as refused:
        deliver_at_ms(given, now_ms=NOW_MS)
    assert "time zone" in refused.value.hint


@pytest.mark.parametrize("text", ["", "soon", "9" * 30, "2027-01-15", "2027-13-45T00:00:00Z", "²"])
def test_text_without_a_time_is_refused(text):
    with raises(Reason.DELIVER_AT):
        read_deliver_at(text, now_ms=NOW_MS)
