"""The states of an executor, and what leads from each to which."""

import itertools

from keylane.producer.executor_state import (
    STEADY,
    ExecutorEvent,
    ExecutorState,
    RouteListing,
    SendResult,
    StorageState,
)

E = ExecutorEvent
START = ExecutorState(SendResult.ANSWERS)


def after(*events: ExecutorEvent, start: ExecutorState = START) -> ExecutorState:
    state = start
    for event in events:
        state = state.apply(event)
    return state


def test_executor_is_available_again_when_its_broker_answers():
    assert START.available
    assert not after(E.FAILED).available
    assert not after(E.FAILED, E.FAILED).available
    assert after(E.FAILED, E.ANSWERED) == START
    assert after(E.FAILED, E.ROUTE_NEEDED, E.ANSWERED) == START


def test_executor_refuses_until_its_next_try_when_a_route_is_needed():
    assert after(E.FAILED, E.ROUTE_NEEDED).refuses
    assert not after(E.FAILED, E.ROUTE_NEEDED, E.FAILED).refuses
    assert not after(E.FAILED).refuses


def test_executor_that_a_route_left_is_never_open_again():
    """A route that lists it again says that its broker is there again, and nothing more."""
    left, gone = after(E.CLOSED_IN_ROUTE), after(E.NOT_IN_ROUTE)
    assert (left.closed, left.unlisted) == (True, False)
    assert (gone.closed, gone.unlisted) == (True, True)
    for event in (E.OPEN_IN_ROUTE, E.CLOSED_IN_ROUTE):
        assert after(event, start=gone) == left
    assert after(E.OPEN_IN_ROUTE, start=left) == left
    assert after(E.OPEN_IN_ROUTE) == START


def test_executor_with_an_accepted_loss_ends_when_its_messages_have_left():
    lost = after(E.LOSS_ACCEPTED)
    assert lost.lost
    assert lost.in_use
    ended = after(E.SEALED, start=lost)
    assert (ended.lost, ended.in_use) == (False, False)
    assert after(E.SEALED) == ended
    assert after(E.LOSS_ACCEPTED, start=ended) == ended


def test_event_changes_one_part_of_the_state():
    """Every combination can be reached; two of them take messages of other partitions."""
    reached, fresh = {START}, [START]
    while fresh:
        state = fresh.pop()
        for event in E:
            following = state.apply(event)
            changed = sum(new is not old for new, old in zip(following, state, strict=True))
            assert changed <= 1, f"{event} changes two parts of {state}"
            if following not in reached:
                reached.add(following)
                fresh.append(following)
    assert reached == set(
        map(ExecutorState._make, itertools.product(SendResult, RouteListing, StorageState))
    )
    assert {state for state in reached if state.can_take_over} == {START, after(E.LOSS_ACCEPTED)}


def test_executor_is_steady_by_identity_when_its_state_is_that_one():
    """It is asked for by `is`, for each batch."""
    assert after(E.FAILED, E.ANSWERED, start=START) is STEADY
    assert after(E.ANSWERED, start=STEADY) is STEADY
    assert after(E.FAILED, start=STEADY) is not STEADY
