"""Sessions that join together are settled together; one that joins alone does not wait."""

from __future__ import annotations

from keylane.metaserver.groups.arrivals import (
    CHECK_MS,
    GATHER_MS_MAX,
    QUIET_MS,
    QUIET_MS_MAX,
    JoinWindow,
)

TTL_MS = 30_000


def joined(count: int, *, at_ms: int = 0, ttl_ms: int = TTL_MS) -> JoinWindow:
    window = JoinWindow()
    for _ in range(count):
        window.begin_join()
    for _ in range(count):
        window.end_join(at_ms, ttl_ms=ttl_ms)
    return window


def test_session_is_settled_at_once_when_it_joins_alone():
    assert joined(1).wait_ms(0) == 0


def test_group_is_settled_later_when_another_join_is_in_flight():
    window = joined(1)
    window.begin_join()
    assert window.wait_ms(0) == CHECK_MS
    window.end_join(10, ttl_ms=None)
    assert window.wait_ms(10) == 0


def test_pause_is_longer_when_more_sessions_have_joined():
    assert joined(3).wait_ms(0) == 2 * QUIET_MS
    assert joined(200).wait_ms(0) == QUIET_MS_MAX
    assert joined(200).wait_ms(QUIET_MS_MAX) == 0


def test_group_is_settled_in_time_when_joins_do_not_end():
    window = joined(1)
    window.begin_join()
    assert window.wait_ms(GATHER_MS_MAX - 1) == 1
    assert window.wait_ms(GATHER_MS_MAX) == 0


def test_wait_is_short_when_the_ttl_of_a_session_is_short():
    window = joined(1)
    window.begin_join()
    window.begin_join()
    window.end_join(0, ttl_ms=800)
    assert window.wait_ms(99) == 1
    assert window.wait_ms(100) == 0


def test_window_is_idle_when_all_joins_have_ended_and_are_settled():
    window = joined(2)
    window.begin_join()
    window.begin_settling()
    assert not window.is_idle
    window.end_join(0, ttl_ms=None)
    assert window.is_idle
