"""The search for an order of overlapping calls agrees with trying every order, and finds what is
planted.
"""

from __future__ import annotations

import random

import pytest
from histories import NO_HOLDER, random_history, try_every_order
from leases import (
    ANSWERED,
    CALLING,
    SERVED,
    Calls,
    FenceCall,
    LeaseCall,
    step_fence,
    step_lease,
)
from linearizable import FOREVER, Operation, is_linearizable


def test_search_agrees_with_trying_every_order():
    rng = random.Random(1)
    verdicts = []
    for _ in range(1_500):
        history = random_history(rng, rng.randrange(3, 8))
        verdict = is_linearizable(history, NO_HOLDER, step_lease)
        assert verdict == try_every_order(history), history
        verdicts.append(verdict)
    assert 300 < sum(verdicts) < 1_200, "both kinds are there"


def observe(invoked: int, returned: int, session: str, token: int) -> Operation[LeaseCall]:
    return Operation(invoked, returned, LeaseCall("observe", session, token))


def test_search_refuses_two_sessions_with_one_lease():
    history = [observe(0, 10, "a", 1), observe(20, 30, "b", 2), observe(40, 50, "a", 1)]
    assert not is_linearizable(history, NO_HOLDER, step_lease)


def test_search_refuses_a_token_that_was_given_before():
    freed = Operation(12, 14, LeaseCall("release", "a", 1))
    assert not is_linearizable(
        [observe(0, 10, "a", 1), freed, observe(20, 30, "b", 1)], NO_HOLDER, step_lease
    )
    assert is_linearizable(
        [observe(0, 10, "a", 1), freed, observe(20, 30, "b", 2)], NO_HOLDER, step_lease
    )


def test_search_lets_an_unanswered_release_take_effect_later():
    lost = Operation(5, FOREVER, LeaseCall("release", "a", 1))
    history = [observe(0, 4, "a", 1), lost, observe(10, 12, "a", 1), observe(20, 30, "b", 2)]
    assert is_linearizable(history, NO_HOLDER, step_lease)


def test_search_of_a_long_history_is_quick():
    history = []
    for token in range(1, 1_501):
        at = 100 * token
        history += [observe(at, at + 60, "ab"[token % 2], token)] * 2
        history.append(Operation(at + 50, at + 99, LeaseCall("release", "ab"[token % 2], token)))
    assert is_linearizable(history, NO_HOLDER, step_lease)


def test_fence_refuses_a_call_below_it():
    calls = [("acquire", 1), ("pull", 1), ("acquire", 2), ("ack", 1)]
    history = [Operation(10 * n, 10 * n + 5, FenceCall(*call)) for n, call in enumerate(calls)]
    assert not is_linearizable(history, 0, step_fence)
    assert is_linearizable(history[:-1], 0, step_fence)
    overlapping = [*history[:-1], history[-1]._replace(invoked=12)]
    assert is_linearizable(overlapping, 0, step_fence)


S, T = "s" * 32, "t" * 32
TTL_MS = 1


class Consumers:
    """Two consumers' records of their calls."""

    def __init__(self) -> None:
        self.calls = Calls()
        self._number = 0

    def heartbeat(self, at_ns: int, session: str, *grants: tuple[int, int]) -> None:
        self._call(at_ns, session, "heartbeat", 0, 0, list(grants), list(grants))

    def release(self, at_ns: int, session: str, token: int) -> None:
        self._call(at_ns, session, "release", 1, token, None, [])

    def _call(self, at_ns, session, call, partition_id, token, holding, grants) -> None:
        self._number += 1
        calling = [self._number, call, session, "g", partition_id, token, holding]
        self.calls.note("c", at_ns, CALLING, calling)
        self.calls.note("c", at_ns + 10, ANSWERED, [self._number, "", TTL_MS, grants])


@pytest.fixture
def consumers() -> Consumers:
    return Consumers()


def test_calls_in_order_are_linearizable(consumers: Consumers):
    consumers.heartbeat(0, S, (1, 1))
    consumers.heartbeat(100, T)
    consumers.release(200, S, 1)
    consumers.heartbeat(300, T, (1, 2))
    consumers.heartbeat(400, S)
    consumers.calls.note("b", 500, SERVED, ["acquire", "g", 1, 2, 450])
    assert list(consumers.calls.judge()) == []


def test_grant_beside_a_live_lease_is_found(consumers: Consumers):
    consumers.heartbeat(0, S, (1, 1))
    consumers.heartbeat(100, T, (1, 2))
    consumers.heartbeat(200, S, (1, 1))
    assert [kind for kind, _ in consumers.calls.judge()] == ["not linearizable"]


def test_grant_before_the_ttl_of_a_silent_session_is_found(consumers: Consumers):
    consumers.heartbeat(0, S, (1, 1))
    consumers.heartbeat(TTL_MS * 1_000_000 - 100, T, (1, 2))
    assert [kind for kind, _ in consumers.calls.judge()] == ["not linearizable"]


def test_grant_after_the_ttl_of_a_silent_session_is_linearizable(consumers: Consumers):
    consumers.heartbeat(0, S, (1, 1))
    consumers.heartbeat(TTL_MS * 1_000_000 + 100, T, (1, 2))
    assert list(consumers.calls.judge()) == []


def test_heartbeat_that_holds_no_partition_frees_it(consumers: Consumers):
    consumers.heartbeat(0, S, (1, 1))
    consumers.heartbeat(100, S)
    consumers.heartbeat(200, T, (1, 2))
    assert list(consumers.calls.judge()) == []


def test_call_accepted_below_the_fence_is_found(consumers: Consumers):
    for at_ns, kind, token in ((10, "acquire", 1), (20, "acquire", 2), (30, "pull", 1)):
        consumers.calls.note("b", at_ns, SERVED, [kind, "g", 1, token, at_ns - 5])
    assert [kind for kind, _ in consumers.calls.judge()] == ["not linearizable"]
