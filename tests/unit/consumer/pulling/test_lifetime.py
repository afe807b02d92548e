"""The states of a pull client: every transition, every event that must not happen, and what each
state allows.
"""

from __future__ import annotations

import itertools

import pytest

from keylane.consumer.pulling.lifetime import (
    ENDED,
    STARTING,
    TRANSITIONS,
    Lifetime,
    PullEvent,
    PullState,
)

UNTIL_MS = 1_000
EXPECTED = {
    PullState.ACQUIRING: {
        PullEvent.ACQUIRED: PullState.PULLING,
        PullEvent.FAILED: PullState.ACQUIRING,
        PullEvent.STOPPED: PullState.STOPPING,
        PullEvent.FENCED: PullState.FENCED,
    },
    PullState.PULLING: {
        PullEvent.FAILED: PullState.ACQUIRING,
        PullEvent.EXHAUSTED: PullState.EXHAUSTED,
        PullEvent.STOPPED: PullState.STOPPING,
        PullEvent.FENCED: PullState.FENCED,
    },
    PullState.EXHAUSTED: {
        PullEvent.STOPPED: PullState.STOPPING,
        PullEvent.FENCED: PullState.FENCED,
    },
    PullState.STOPPING: {
        PullEvent.STOPPED: PullState.STOPPING,
        PullEvent.CLOSED: PullState.CLOSED,
        PullEvent.FENCED: PullState.FENCED,
    },
    PullState.CLOSED: {},
    PullState.FENCED: {
        PullEvent.STOPPED: PullState.FENCED,
        PullEvent.CLOSED: PullState.FENCED,
        PullEvent.FENCED: PullState.FENCED,
    },
}
"""Written down once more, so that a change of the table is a decision."""


def life_in(state: PullState) -> Lifetime:
    life = Lifetime(UNTIL_MS)
    life.state = state
    return life


@pytest.mark.parametrize(
    ("state", "event"), list(itertools.product(PullState, PullEvent)), ids=lambda value: value.name
)
def test_event_leads_to_the_expected_state_or_is_refused(state: PullState, event: PullEvent):
    """A refused event changes nothing."""
    life = life_in(state)
    after = EXPECTED[state].get(event)
    if after is None:
        with pytest.raises(AssertionError, match=f"{state.name} must not be {event.name}"):
            life.handle_event(event)
        assert life.state is state
    else:
        life.handle_event(event)
        assert life.state is after


def test_every_state_is_reached_from_a_new_grant():
    """And from each of them an end is reached."""
    reached = {Lifetime(UNTIL_MS).state}
    for _ in PullState:
        reached |= {after for (state, _), after in TRANSITIONS.items() if state in reached}
    assert reached == set(PullState)
    ending = set(ENDED)
    for _ in PullState:
        ending |= {state for (state, _), after in TRANSITIONS.items() if after in ending}
    assert ending == set(PullState)


@pytest.mark.parametrize("state", PullState, ids=lambda state: state.name)
def test_handlers_start_only_in_starting_states(state: PullState):
    """The deadline that is read before a handler is 0 in all others, whatever is left of the
    lease.
    """
    expected_ns = UNTIL_MS * 1_000_000 if state in STARTING else 0
    assert life_in(state).deadline_ns == expected_ns


def test_starting_states_are_left_for_good():
    """Once stopped or fenced, no event lets a handler start."""
    back = [pair for pair, after in TRANSITIONS.items() if after in STARTING]
    assert all(state in STARTING for state, _ in back)


@pytest.mark.parametrize("state", PullState, ids=lambda state: state.name)
def test_acks_of_the_user_are_taken_until_the_end_of_the_lease_or_of_the_hand_over(
    state: PullState,
):
    """A partition that is being handed over still takes them."""
    life = life_in(state)
    ended = state in {PullState.CLOSED, PullState.FENCED}
    assert life.ack_deadline_ns == (0 if ended else UNTIL_MS * 1_000_000)


def test_lapsed_lease_is_not_renewed():
    """Messages may have been skipped by then."""
    life = Lifetime(UNTIL_MS)
    assert life.renew(2_000, now_ms=UNTIL_MS - 1)
    assert (life.lease_until_ms, life.left_ms(1_500)) == (2_000, 500)
    assert life.lapsed(2_000)
    assert not life.renew(3_000, now_ms=2_000)
    assert (life.lease_until_ms, life.left_ms(2_500)) == (2_000, 0)


def test_renewal_during_a_hand_over_starts_no_handler():
    """It only leaves more time for the last acks."""
    life = Lifetime(UNTIL_MS)
    life.handle_event(PullEvent.STOPPED)
    assert life.renew(2_000, now_ms=10)
    assert life.deadline_ns == 0
    assert life.left_ms(1_500) == 500


def test_first_fence_is_kept():
    """Pulls and acks may both be refused; the partition is lost from the first refusal on."""
    life = Lifetime(UNTIL_MS)
    assert life.on_fence(7)
    assert not life.on_fence(9)
    assert (life.fenced, life.fence) == (True, 7)
    assert life.lapsed(0)
    assert life.left_ms(0) == 0
    assert not life.renew(2_000, now_ms=0)
