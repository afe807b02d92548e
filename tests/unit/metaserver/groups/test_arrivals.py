"""Sessions that join together are settled together, and one that joins alone waits for nothing."""

from __future__ import annotations

from keylane.metaserver.groups.arrivals import (
    GATHER_MS_MAX,
    LOOK_MS,
    PAUSE_MS,
    PAUSE_MS_MAX,
    Arrivals,
)

TTL_MS = 30_000


def joined(count: int, *, at_ms: int = 0, ttl_ms: int = TTL_MS) -> Arrivals:
    arrivals = Arrivals()
    for _ in range(count):
        arrivals.began()
    for _ in range(count):
        arrivals.ended(at_ms, ttl_ms=ttl_ms)
    return arrivals


def test_session_is_settled_at_once_when_it_joins_alone():
    assert joined(1).wait_ms(0) == 0


def test_group_is_settled_later_when_another_join_is_under_way():
    arrivals = joined(1)
    arrivals.began()
    assert arrivals.wait_ms(0) == LOOK_MS
    arrivals.ended(10, ttl_ms=None)
    assert arrivals.wait_ms(10) == 0


def test_pause_is_longer_when_more_sessions_have_joined():
    assert joined(3).wait_ms(0) == 2 * PAUSE_MS
    assert joined(200).wait_ms(0) == PAUSE_MS_MAX
    assert joined(200).wait_ms(PAUSE_MS_MAX) == 0


def test_group_is_settled_in_time_when_joins_do_not_end():
    arrivals = joined(1)
    arrivals.began()
    assert arrivals.wait_ms(GATHER_MS_MAX - 1) == 1
    assert arrivals.wait_ms(GATHER_MS_MAX) == 0


def test_wait_is_short_when_the_ttl_of_a_session_is_short():
    arrivals = joined(1)
    arrivals.began()
    arrivals.began()
    arrivals.ended(0, ttl_ms=800)
    assert arrivals.wait_ms(99) == 1
    assert arrivals.wait_ms(100) == 0


def test_arrivals_are_over_when_all_have_ended_and_are_settled():
    arrivals = joined(2)
    arrivals.began()
    arrivals.settled()
    assert not arrivals.is_over
    arrivals.ended(0, ttl_ms=None)
    assert arrivals.is_over
