"""Where a reader starts and stops."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from keylane.consumer.reading.bounds import (
    BoundKind,
    resolve_start,
    resolve_stop,
    start_bound,
    stop_bound,
)
from keylane.errors import InvalidRequestError, OffsetOutOfRangeError, Reason
from support.raising import raises

NOW_MS = 1_700_000_000_000
STORED = {"first": 10, "end": 20}


def start(given, *, partition=None, at_time=None) -> int:
    bound = start_bound(given, partition=partition, now_ms=NOW_MS)
    return resolve_start(bound, 7, **STORED, at_time=at_time)


def stop(given, *, partition=None, at_time=None) -> int:
    bound = stop_bound(given, partition=partition, now_ms=NOW_MS)
    return resolve_stop(bound, 7, **STORED, at_time=at_time)


def test_start_is_within_what_is_stored():
    assert start("earliest") == 10
    assert start("latest") == 20
    assert start("-1h", at_time=15) == 15
    assert start(timedelta(hours=-1), at_time=None) == 20
    assert start(datetime(2023, 1, 1, tzinfo=UTC), at_time=3) == 10
    assert start(12, partition=7) == 12
    assert start({7: 20}) == 20
    assert start({8: 3}) == 10
    assert start({"7": 13}) == 13, "as JSON has it"


def test_stop_is_the_first_message_that_is_not_read():
    assert stop("latest") == 20
    assert stop("-1h", at_time=15) == 15
    assert stop("-1h", at_time=None) == 20
    assert stop(12, partition=7) == 12


@pytest.mark.parametrize("offset", [9, 21, 2**62])
def test_offset_beyond_what_is_stored_is_refused(offset):
    for ask in (start, stop):
        with pytest.raises(OffsetOutOfRangeError, match="offsets 10 to 20") as refused:
            ask(offset, partition=7)
        assert (refused.value.first_offset, refused.value.next_offset) == (10, 20)
    with pytest.raises(OffsetOutOfRangeError):
        start({7: offset})


@pytest.mark.parametrize(
    ("given", "kind", "text"),
    [
        (3, InvalidRequestError, "also pass `partition`"),
        ("first", InvalidRequestError, "'earliest', 'latest'"),
        ("1h", InvalidRequestError, "how long ago"),
        (True, InvalidRequestError, "start must be"),
        (1.5, InvalidRequestError, "start must be"),
        (None, InvalidRequestError, "start must be"),
        (-1, Reason.OFFSET_INVALID, "-1"),
        ({"07": 3}, InvalidRequestError, "partition ids"),
        ({"orders": 3}, InvalidRequestError, "partition ids"),
        ({"7": 3, 7: 3}, InvalidRequestError, "twice"),
        ({"7": "3"}, Reason.OFFSET_INVALID, "3"),
        ({7: -3}, Reason.OFFSET_INVALID, "-3"),
        (timedelta(hours=1), InvalidRequestError, "in the future"),
    ],
)
def test_start_that_means_nothing_is_refused(given, kind, text):
    with raises(kind, match=text):
        start_bound(given, partition=None, now_ms=NOW_MS)


def test_stop_has_no_first_message():
    with pytest.raises(InvalidRequestError):
        stop_bound("earliest", partition=None, now_ms=NOW_MS)
    assert stop_bound("-1m", partition=None, now_ms=NOW_MS).kind is BoundKind.TIME
