"""How many retries run at once, and how much of the workers' time they get."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from keylane.consumer.dispatch.offers import (
    LONG_MS,
    PAUSE_MAX_MS,
    TIME_DIVISOR,
    RetryShare,
)

SECOND_MS = 1_000


@pytest.mark.parametrize(("concurrency", "places"), [(1, 1), (4, 1), (16, 4), (100, 25)])
def test_quarter_of_the_workers_retries_at_once(concurrency: int, places: int):
    """The others are free for other messages; the next retry may begin when one ends."""
    share = RetryShare(concurrency)
    assert share.room(1, first_attempts_wait=False) == places
    for retry in range(places):
        share.take(retry)
    assert share.room(1, first_attempts_wait=False) == 0
    assert share.next_ms(1, first_attempts_wait=False) is None, "only an end makes room"
    share.end(0, 2)
    assert share.room(2, first_attempts_wait=False) == 1


def test_hanging_retry_does_not_delay_others():
    """After ten seconds it is no longer counted."""
    share = RetryShare(4)
    share.take(1)
    share.begin(1, 5)
    assert share.next_ms(6, first_attempts_wait=False) == 5 + LONG_MS
    assert share.room(4 + LONG_MS, first_attempts_wait=False) == 0
    assert share.room(5 + LONG_MS, first_attempts_wait=False) == 1


def test_retries_get_their_share_of_the_time_while_first_tries_wait():
    """On one worker first attempts follow half a second of retries; without them there is no
    pause.
    """
    share = RetryShare(1)
    share.take(1)
    share.begin(1, SECOND_MS * 3 // 2)
    share.end(1, 2 * SECOND_MS)
    next_ms = share.next_ms(2 * SECOND_MS, first_attempts_wait=True)
    assert next_ms is not None
    assert (TIME_DIVISOR / 2 + 1.4) * SECOND_MS < next_ms < (TIME_DIVISOR / 2 + 1.6) * SECOND_MS
    assert share.room(next_ms - 1, first_attempts_wait=True) == 0
    assert share.room(next_ms, first_attempts_wait=True) == 1
    assert share.next_ms(2 * SECOND_MS, first_attempts_wait=False) == 2 * SECOND_MS
    assert share.room(2 * SECOND_MS, first_attempts_wait=False) == 1


def test_slow_retries_pause_no_longer_than_the_limit():
    """A try that times out after a minute is followed by one half a minute later, not forty."""
    share = RetryShare(1)
    share.take(1)
    share.begin(1, SECOND_MS)
    share.end(1, 60 * SECOND_MS)
    next_ms = share.next_ms(60 * SECOND_MS, first_attempts_wait=True)
    assert next_ms is not None
    assert next_ms <= 60 * SECOND_MS + PAUSE_MAX_MS


class RetryShareMachine(RuleBasedStateMachine):
    """In any order of calls, the time of the next retry is known, or one must end first."""

    def __init__(self) -> None:
        super().__init__()
        self.share = RetryShare(8)
        self.now_ms = 1
        self.count = 0
        self.active: set[int] = set()
        self.taken: set[int] = set()
        """Those of them that have not begun."""

    @rule(ms=st.integers(0, 30 * SECOND_MS))
    def pass_time(self, ms: int) -> None:
        self.now_ms += ms

    @rule(waits=st.booleans())
    def take(self, waits: bool) -> None:
        for _ in range(self.share.room(self.now_ms, first_attempts_wait=waits)):
            self.share.take(self.count)
            self.active.add(self.count)
            self.taken.add(self.count)
            self.count += 1

    @precondition(lambda self: self.taken)
    @rule(data=st.data())
    def begin(self, data: st.DataObject) -> None:
        retry = data.draw(st.sampled_from(sorted(self.taken)))
        self.taken.remove(retry)
        self.share.begin(retry, self.now_ms)

    @precondition(lambda self: self.active)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        retry = data.draw(st.sampled_from(sorted(self.active)))
        self.active.remove(retry)
        self.taken.discard(retry)
        self.share.end(retry, self.now_ms)

    @invariant()
    def something_can_happen(self) -> None:
        next_ms = self.share.next_ms(self.now_ms, first_attempts_wait=False)
        assert (
            self.active if next_ms is None else self.share.room(next_ms, first_attempts_wait=False)
        )
        assert self.active or self.share.next_ms(self.now_ms, first_attempts_wait=True) is not None


TestRetryShareMachine = RetryShareMachine.TestCase
