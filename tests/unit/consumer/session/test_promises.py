"""A session whose heartbeats fail asks its broker to witness that it lives."""

from __future__ import annotations

import pytest

from keylane.consumer.session.events import CallFailed, LeaseGranted, Tick
from keylane.consumer.session.state import SessionPhase
from keylane.protocol.errors import UnreachableError
from keylane.protocol.frames import Ack, Acked, Pull, Release
from support.session.steps import LEASE_MS, Steps

TTL_MS = 30_000
MARGIN_MS = TTL_MS // 10
ASK_MS = LEASE_MS - TTL_MS * 30 // 100
"""When a session asks that got one lease at the beginning, and no further heartbeat."""


def asked(steps: Steps) -> list[int]:
    return [request.promise_ms for request in steps.requested(Ack)]


def test_session_asks_for_no_promise_while_heartbeats_succeed():
    steps = Steps(b"a", ttl_ms=TTL_MS)
    for _ in range(20):
        steps.step(Tick(), after_ms=TTL_MS // 4)
        assert asked(steps) == []
        steps.step(LeaseGranted(steps.now_ms + LEASE_MS))


def test_session_asks_for_promises_when_heartbeats_fail_and_handles_on():
    steps = Steps(b"a", b"b", ttl_ms=TTL_MS)
    steps.step(Tick(), after_ms=ASK_MS)
    for _ in range(40):
        assert asked(steps) == [TTL_MS // 2]
        steps.step(Acked(0, 0, TTL_MS // 2), after_ms=30)
        assert steps.session.tenure.until_ms == steps.now_ms - 30 + TTL_MS // 2 - MARGIN_MS
        steps.step(Tick(), after_ms=TTL_MS // 6 - 30)
    steps.pull(1)
    assert steps.want() == [0]


def test_promise_ends_the_lease_no_earlier():
    steps = Steps(b"a", ttl_ms=TTL_MS)
    until_ms = steps.session.tenure.until_ms
    steps.step(Tick(), after_ms=ASK_MS)
    steps.step(Acked(0, 0, 1_000))
    assert steps.session.tenure.until_ms == until_ms


def test_heartbeat_ends_no_promise():
    steps = Steps(b"a", ttl_ms=TTL_MS)
    steps.step(Tick(), after_ms=ASK_MS)
    steps.step(Acked(0, 0, TTL_MS // 2))
    until_ms = steps.session.tenure.until_ms
    steps.step(LeaseGranted(steps.now_ms + 1))
    assert steps.session.tenure.until_ms == until_ms


def test_promise_does_not_revive_a_lease_that_has_ended():
    steps = Steps(b"a", ttl_ms=TTL_MS)
    steps.step(Tick(), after_ms=ASK_MS)
    steps.step(Acked(0, 0, 10 * TTL_MS), after_ms=LEASE_MS)
    assert steps.session.tenure.phase is not SessionPhase.SERVING
    assert not steps.session.tenure.may_hand_out(steps.now_ms)


def test_session_ends_at_its_deadline_when_the_broker_gives_no_promise():
    """As brokers of an earlier version do."""
    steps = Steps(b"a", ttl_ms=TTL_MS)
    steps.step(Tick(), after_ms=ASK_MS)
    steps.step(Acked(0))
    steps.step(Tick(), after_ms=LEASE_MS - ASK_MS)
    assert steps.session.tenure.phase is SessionPhase.STOPPING


def test_session_asks_again_soon_when_its_question_was_lost():
    steps = Steps(b"a", ttl_ms=TTL_MS)
    steps.step(Tick(), after_ms=ASK_MS)
    request = steps.requested(Ack)[0]
    steps.step(CallFailed(request, UnreachableError("no answer")))
    steps.step(Tick(), after_ms=1_000)
    assert asked(steps) == [TTL_MS // 2]


def test_session_hands_over_when_a_higher_token_waits():
    steps = Steps(b"a", b"b", ttl_ms=TTL_MS)
    steps.pull(2)
    assert steps.want() == [0]
    steps.step(Tick(), after_ms=ASK_MS)
    steps.step(Acked(0, is_wanted=True))
    assert steps.want() == [], "nothing starts"
    assert not steps.requested(Release), "the lock is kept while a handler runs"
    steps.handle(0)
    assert [request.ranges for request in steps.requested(Ack)] == [((0, 1),)]
    steps.ack(1)
    assert steps.requested(Release)
    assert not steps.requested(Pull)


@pytest.mark.parametrize("strategy", ["shared"])
def test_session_of_a_shared_group_asks_for_no_promise(strategy):
    steps = Steps(b"a", ttl_ms=TTL_MS, consume_strategy=strategy)
    steps.step(Tick(), after_ms=ASK_MS + 1_000)
    assert set(asked(steps)) <= {0}
