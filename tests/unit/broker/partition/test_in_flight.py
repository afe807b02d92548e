"""What is in flight of a shared group: handed out, acked, given back, past its deadline."""

from __future__ import annotations

import pytest

from keylane.broker.partition import in_flight
from keylane.broker.partition.in_flight import NEVER_MS, InFlight, InFlightRange
from keylane.protocol.limits import IN_FLIGHT_PER_SESSION_MAX
from keylane.protocol.offsets import AckedOffsets

A, B = "a" * 16, "b" * 16


def hand_out(
    messages: InFlight,
    acked: AckedOffsets,
    session: str = A,
    *,
    count_max: int = 10,
    readable_offset: int = 100,
    now_ms: int = 0,
    in_flight_ms: int = 1_000,
) -> list[tuple[int, int]]:
    return messages.hand_out(
        acked,
        session,
        count_max=count_max,
        readable_offset=readable_offset,
        now_ms=now_ms,
        in_flight_ms=in_flight_ms,
    )


def test_two_sessions_never_have_the_same_message():
    """Each session gets the lowest messages that no other session has."""
    messages, acked = InFlight(1), AckedOffsets()
    assert hand_out(messages, acked) == [(0, 10)]
    assert hand_out(messages, acked, B) == [(10, 20)]
    assert hand_out(messages, acked, readable_offset=25) == [(20, 25)]
    assert hand_out(messages, acked, B, readable_offset=25) == []


def test_acked_messages_are_never_handed_out():
    """Ranges acked above the cursor are left out, as after a restart of the broker."""
    messages, acked = InFlight(1), AckedOffsets(3, [(5, 7), (9, 10)])
    assert hand_out(messages, acked, count_max=5) == [(3, 5), (7, 9), (10, 11)]


def test_silent_session_delays_only_what_it_has():
    """At its deadline that is free again, and nothing before; the others go on meanwhile."""
    messages, acked = InFlight(1), AckedOffsets()
    hand_out(messages, acked, A, in_flight_ms=1_000)
    assert hand_out(messages, acked, B, now_ms=999) == [(10, 20)]
    messages.remove([(10, 20)])
    acked.add(10, 20)
    assert messages.next_deadline_ms == 1_000
    assert hand_out(messages, acked, B, now_ms=1_000) == [(0, 10)]


def test_acked_parts_of_an_expired_range_are_not_handed_out_again():
    """Only the rest of a range is handed out again."""
    messages, acked = InFlight(1), AckedOffsets()
    hand_out(messages, acked, A)
    messages.remove([(2, 4), (6, 10)])
    acked.add(2, 4)
    acked.add(6, 10)
    assert messages.ranges == [InFlightRange(0, 2, A, 1_000), InFlightRange(4, 6, A, 1_000)]
    assert hand_out(messages, acked, B, now_ms=1_000) == [(0, 2), (4, 6), (10, 16)]


def test_given_back_is_free_at_once():
    """A session that leaves gives back its own messages and keeps those of other sessions where
    they are.
    """
    messages, acked = InFlight(1), AckedOffsets()
    hand_out(messages, acked, A)
    hand_out(messages, acked, B)
    assert messages.release_session(A)
    assert not messages.release_session(A)
    assert messages.ranges == [InFlightRange(10, 20, B, 1_000)]
    assert hand_out(messages, acked, B) == [(0, 10)]


def test_unread_messages_are_free_again_after_a_trim():
    """A read that brought less than was handed out gives the rest back."""
    messages, acked = InFlight(1), AckedOffsets(0, [(5, 7)])
    ranges = hand_out(messages, acked)
    assert ranges == [(0, 5), (7, 12)]
    assert messages.free_from(A, ranges, end_offset=9) == [(0, 5), (7, 9)]
    assert hand_out(messages, acked, B, count_max=3) == [(9, 12)]


def test_far_apart_is_not_one_read():
    """A range that comes long after the one before it is left for the next request."""
    messages, acked = InFlight(1), AckedOffsets(0, [(1, 90)])
    assert hand_out(messages, acked) == [(0, 1)]
    assert hand_out(messages, acked) == [(90, 100)]


def test_there_is_no_deadline_when_no_message_is_in_flight():
    """A pull then waits for new messages only."""
    messages, acked = InFlight(1), AckedOffsets()
    hand_out(messages, acked)
    messages.remove([(0, 10)])
    assert messages.next_deadline_ms == NEVER_MS


def test_session_has_a_limit():
    """One session cannot take everything."""
    messages, acked = InFlight(1), AckedOffsets()
    much = 10 * IN_FLIGHT_PER_SESSION_MAX
    hand_out(messages, acked, count_max=much, readable_offset=much)
    assert messages.count(A) == IN_FLIGHT_PER_SESSION_MAX
    assert hand_out(messages, acked, count_max=much, readable_offset=much) == []
    assert hand_out(messages, acked, B, count_max=1, readable_offset=much) != []


def test_with_too_many_acked_ranges_only_the_lowest_gap_is_handed_out(monkeypatch):
    """The cursor has to rise before anything else is begun, and then all goes on."""
    monkeypatch.setattr(in_flight, "ACK_RANGES_MAX", 3)
    messages, acked = InFlight(1), AckedOffsets(0, [(2, 3), (4, 5), (6, 7)])
    assert hand_out(messages, acked) == [(0, 2)]
    assert hand_out(messages, acked, B) == []
    messages.remove([(0, 2)])
    acked.add(0, 2)
    assert hand_out(messages, acked, B) == [(3, 4), (5, 6), (7, 15)]


def test_ranges_in_flight_have_a_limit(monkeypatch: pytest.MonkeyPatch):
    """Above it nothing is handed out until something is acked or free."""
    monkeypatch.setattr(in_flight, "IN_FLIGHT_RANGES_MAX", 2)
    messages, acked = InFlight(1), AckedOffsets()
    assert hand_out(messages, acked, count_max=1) == [(0, 1)]
    assert hand_out(messages, acked, count_max=1) == [(1, 2)]
    assert hand_out(messages, acked, count_max=1) == []
    assert hand_out(messages, acked, count_max=1, now_ms=1_000) == [(0, 1)]


def test_held_messages_are_in_flight_for_longer():
    """Those beside them are free at their deadline, and the held ones once they are held no
    more.
    """
    messages, acked = InFlight(1), AckedOffsets()
    assert hand_out(messages, acked) == [(0, 10)]
    messages.extend_deadlines(acked, A, [(2, 4), (7, 8)], now_ms=900, in_flight_ms=1_000)
    assert hand_out(messages, acked, B, now_ms=1_000, readable_offset=10) == [
        (0, 2),
        (4, 7),
        (8, 10),
    ]
    assert hand_out(messages, acked, B, now_ms=1_899, readable_offset=10) == []
    assert hand_out(messages, acked, B, now_ms=1_900, readable_offset=10) == [(2, 4), (7, 8)]


def test_held_messages_that_were_freed_are_in_flight_again():
    """After a restart nothing is in flight; what another session has by then, or what is acked,
    stays so.
    """
    messages, acked = InFlight(1), AckedOffsets()
    messages.add_session(A, ttl_ms=5_000, now_ms=0)
    assert hand_out(messages, acked, B, count_max=2) == [(0, 2)]
    acked.add(3, 4)
    messages.extend_deadlines(acked, A, [(1, 5)], now_ms=0, in_flight_ms=1_000)
    flying = [(each.start, each.end, each.session) for each in messages.ranges]
    assert flying == [(0, 2, B), (2, 3, A), (4, 5, A)]


def test_session_that_has_left_holds_nothing():
    messages, acked = InFlight(1), AckedOffsets()
    hand_out(messages, acked)
    messages.release_session(A)
    messages.extend_deadlines(acked, A, [(0, 2)], now_ms=0, in_flight_ms=1_000)
    assert messages.ranges == []


def test_silent_session_has_nothing_after_its_ttl():
    """All that it has is free then, however long it may be in flight; what others have is not."""
    messages, acked = InFlight(1), AckedOffsets()
    messages.add_session(A, ttl_ms=300, now_ms=0)
    messages.add_session(B, ttl_ms=5_000, now_ms=0)
    assert hand_out(messages, acked, A, in_flight_ms=60_000) == [(0, 10)]
    assert hand_out(messages, acked, B, in_flight_ms=60_000) == [(10, 20)]
    assert messages.next_deadline_ms == 300
    assert hand_out(messages, acked, B, now_ms=299, in_flight_ms=60_000) == [(20, 30)]
    assert hand_out(messages, acked, B, now_ms=300, in_flight_ms=60_000) == [(0, 10)]
    assert messages.count(A) == 0
    assert messages.next_deadline_ms == 5_000


def test_session_that_is_heard_keeps_what_it_has():
    """Each pull and each ack counts, an empty one too; the messages' own deadline stands all the
    same.
    """
    messages, acked = InFlight(1), AckedOffsets()
    messages.add_session(A, ttl_ms=300, now_ms=0)
    assert hand_out(messages, acked, A, in_flight_ms=1_000) == [(0, 10)]
    for now_ms in range(100, 900, 200):
        messages.renew_session(A, ttl_ms=1, now_ms=now_ms)
        assert hand_out(messages, acked, B, now_ms=now_ms + 199, count_max=1) != [(0, 1)]
    assert hand_out(messages, acked, B, now_ms=1_000, count_max=1) == [(0, 1)]


def test_session_that_is_heard_again_has_the_ttl_of_its_last_acquire():
    """One that did not acquire since it was silent has the ttl that it is given."""
    messages, acked = InFlight(1), AckedOffsets()
    messages.renew_session(A, ttl_ms=700, now_ms=0)
    assert hand_out(messages, acked, A, in_flight_ms=60_000) == [(0, 10)]
    assert hand_out(messages, acked, B, now_ms=699, count_max=1) == [(10, 11)]
    assert hand_out(messages, acked, B, now_ms=700, count_max=1) == [(0, 1)]


def test_silent_sessions_are_forgotten(monkeypatch):
    """However many come and go without a word, those known are bounded, and none keeps messages for
    ever.
    """
    monkeypatch.setattr(in_flight, "SESSIONS_MAX", 10)
    messages, acked = InFlight(1), AckedOffsets()
    for number in range(100):
        session = f"session-{number}"
        messages.add_session(session, ttl_ms=5, now_ms=number)
        hand_out(messages, acked, session, count_max=1, now_ms=number, in_flight_ms=60_000)
        assert len(messages._sessions) <= 11
    assert len(messages.ranges) <= 6
    assert messages.is_empty(now_ms=1_000)


def test_session_redrives_alone_until_it_leaves_or_is_silent():
    messages = InFlight(1)
    for session in (A, B):
        messages.add_session(session, ttl_ms=100, now_ms=0)
    assert messages.is_redriver(A, 0)
    assert not messages.is_redriver(B, 0)
    messages.renew_session(B, ttl_ms=100, now_ms=90)
    assert not messages.is_redriver(B, 99)
    assert messages.is_redriver(B, 100), "the other was silent for its ttl"
    assert not messages.is_redriver(A, 100)
    messages.release_session(B)
    messages.renew_session(A, ttl_ms=100, now_ms=110)
    assert messages.is_redriver(A, 110)
