"""Instants as programs and operators give them."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta, timezone

import pandas as pd
import pytest

from keylane import Admin, InvalidRequestError, QueueReader
from keylane.admin import GroupStart, StartAt
from keylane.errors import ConfigError
from keylane.protocol.reading.instants import (
    check_not_ahead,
    check_unit,
    group_start,
    parse_ago_ms,
    parse_instant_ms,
    since_1970_ms,
)

NOW_MS = 1_700_000_000_000


@pytest.mark.parametrize(
    ("text", "ms"),
    [
        ("-500ms", 500),
        ("-30s", 30_000),
        ("-15m", 900_000),
        ("-1h", 3_600_000),
        ("-2d", 172_800_000),
        ("-1w", 604_800_000),
    ],
)
def test_text_says_how_long_ago(text, ms):
    assert parse_ago_ms(text) == ms
    assert parse_instant_ms(text, now_ms=NOW_MS) == NOW_MS - ms


@pytest.mark.parametrize("text", ["1h", "-1", "-h", "-1.5h", "-1y", " -1h", "yesterday", "-1h30m"])
def test_other_text_is_refused_with_an_example(text):
    assert parse_ago_ms(text) is None
    with pytest.raises(InvalidRequestError, match="-1h"):
        parse_instant_ms(text, now_ms=NOW_MS)


def test_instant_is_the_same_in_every_zone():
    zone = timezone(timedelta(hours=5))
    given = datetime(2023, 11, 14, 12, tzinfo=UTC)
    assert parse_instant_ms(given, now_ms=NOW_MS) == parse_instant_ms(
        given.astimezone(zone), now_ms=NOW_MS
    )
    assert parse_instant_ms(timedelta(hours=-1), now_ms=NOW_MS) == NOW_MS - 3_600_000


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (pd.NaT, "NaT is not an instant"),
        (datetime(2023, 11, 14), "no time zone"),
        (datetime(2024, 11, 14, tzinfo=UTC), "in the future"),
        (timedelta(seconds=2), "in the future"),
        (datetime(1960, 1, 1, tzinfo=UTC), "before 1970"),
        ("-9999w", "before 1970"),
    ],
)
def test_instant_that_has_no_messages_is_refused(given, text):
    with pytest.raises(InvalidRequestError, match=text):
        parse_instant_ms(given, now_ms=NOW_MS)


def test_instant_of_a_clock_that_is_ahead_a_little_is_now():
    assert parse_instant_ms(timedelta(milliseconds=900), now_ms=NOW_MS) == NOW_MS


@pytest.mark.parametrize(
    ("given", "start"),
    [
        (None, None),
        ("earliest", GroupStart()),
        ("latest", GroupStart(at=StartAt.LATEST)),
        ("-1h", GroupStart(at=StartAt.TIME, at_ms=NOW_MS - 3_600_000)),
        ("2023-11-14T12:00:00Z", GroupStart(at=StartAt.TIME, at_ms=1_699_963_200_000)),
        (timedelta(seconds=-1), GroupStart(at=StartAt.TIME, at_ms=NOW_MS - 1_000)),
    ],
)
def test_start_of_a_group_is_a_word_or_an_instant(given, start):
    assert group_start(given, now_ms=NOW_MS) == start


@pytest.mark.parametrize(
    "given", ["newest", 17, b"latest", ["latest"], datetime(2023, 11, 14), "time"]
)
def test_other_start_of_a_group_is_refused(given):
    with pytest.raises(ConfigError, match="start"):
        group_start(given, now_ms=NOW_MS)


def test_text_is_an_instant_when_it_says_how_long_ago_or_names_its_zone():
    now_ms = 1_800_000_000_000
    assert parse_instant_ms("-1h", now_ms=now_ms) == now_ms - 3_600_000
    assert parse_instant_ms("2024-05-31T12:00:00Z", now_ms=now_ms) == 1_717_156_800_000
    assert parse_instant_ms("2024-05-31 14:00:00.5+02:00", now_ms=now_ms) == 1_717_156_800_500


@pytest.mark.parametrize(
    "text", ["", "yesterday", "1h", "2024-05-31T12:00:00", "2999-01-01T00:00:00Z"]
)
def test_text_is_refused_when_it_is_no_instant_that_has_passed(text):
    with pytest.raises(InvalidRequestError):
        parse_instant_ms(text, now_ms=1_800_000_000_000)


@pytest.mark.parametrize("year", [1, 1969, 1970, 2039, 9999])
def test_milliseconds_of_a_time_are_exact_in_every_year(year):
    begin = datetime(year, 1, 1, tzinfo=UTC)
    begin_ms = (begin.toordinal() - datetime(1970, 1, 1, tzinfo=UTC).toordinal()) * 86_400_000
    times = [begin + timedelta(milliseconds=ms) for ms in range(1_000)]
    assert [since_1970_ms(at) - begin_ms for at in times] == list(range(1_000))
    zone = timezone(timedelta(hours=14))
    assert since_1970_ms(datetime(year, 1, 1, 14, tzinfo=zone)) == begin_ms


@pytest.mark.parametrize(
    ("at_ms", "told"),
    [
        (1_795_865_291, "is seconds: use 1795865291000"),
        (1_000_000_000, "is seconds"),
        (99_999_999_999, "is seconds"),
        (1_795_865_291_000_000, "micro- or nanoseconds"),
        (1_795_865_291_000_000_000, "micro- or nanoseconds"),
    ],
)
def test_instant_in_another_unit_than_milliseconds_is_refused(at_ms: int, told: str):
    with pytest.raises(
        InvalidRequestError, match=f"at_ms is milliseconds since 1970, and .*{told}"
    ):
        check_unit("at_ms", at_ms)


@pytest.mark.parametrize("at_ms", [0, 1, 999_999_999, 100_000_000_000, NOW_MS, None, "x", True])
def test_instant_in_milliseconds_passes(at_ms: object):
    check_unit("at_ms", at_ms)


@pytest.mark.parametrize("at_ms", [1_795_865_291, 1_795_865_291_000_000_000])
async def test_group_is_neither_reset_nor_made_by_an_instant_in_another_unit(at_ms: int):
    """Seconds had a group handle all messages again, nanoseconds none of those that were stored."""
    async with Admin("127.0.0.1:1") as admin:
        with pytest.raises(InvalidRequestError, match="at_ms is milliseconds since 1970"):
            await admin.reset_group("orders", "billing", "time", at_ms=at_ms)
        with pytest.raises(InvalidRequestError, match="at_ms is milliseconds since 1970"):
            await admin.create_group("orders", "billing", start="time", at_ms=at_ms)
    async with QueueReader("127.0.0.1:1", subject="ledger") as reader:
        with pytest.raises(InvalidRequestError, match="at_ms is milliseconds since 1970"):
            await reader.offset_at(0, at_ms)


@pytest.mark.parametrize("at_ms", [0, NOW_MS, NOW_MS + 60_000, None, "x", True])
def test_instant_passes_when_it_is_at_most_a_minute_ahead(at_ms: object):
    check_not_ahead(at_ms, now_ms=NOW_MS)


async def test_group_is_neither_reset_nor_made_by_an_instant_that_is_ahead():
    """A mistyped year had a group skip all messages."""
    async with Admin("127.0.0.1:1") as admin:
        for call in (
            admin.reset_group("orders", "billing", "time", at_ms=4_070_908_800_000, live=True),
            admin.reset_group("orders", "billing", "time", at_ms=4_070_908_800_000, dry_run=True),
            admin.create_group("orders", "billing", start="time", at_ms=4_070_908_800_000),
        ):
            with pytest.raises(InvalidRequestError, match="2099-01-01T00:00:00") as refused:
                await call
            assert "is in the future" in refused.value.message
            assert "'latest'" in refused.value.hint
