"""The table of states is complete and matches the documentation; decisions follow from it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import pytest

from keylane.metaserver.operations.states import (
    RULES,
    RUNNING_STATES,
    BrokerAction,
    NextAction,
    PendingStep,
    next_action,
    next_state,
    waiting_reason,
)
from keylane.protocol.operations import ROUTE_FINAL, OperationState
from keylane.protocol.routing import PartitionState

PLAN, SEAL, OPEN = OperationState.PLAN, OperationState.SEAL, OperationState.OPEN
FENCE, DONE, CANCELED = OperationState.FENCE, OperationState.DONE, OperationState.CANCELED
ARCHITECTURE = Path(__file__).parents[4] / "docs" / "ARCHITECTURE.md"


def pending(
    action: BrokerAction, *, alive: bool = True, given_up: bool = False, may_reorder: bool = False
) -> PendingStep:
    return PendingStep(
        action=action,
        partition_id=1,
        broker_group="g1",
        alive=alive,
        given_up=given_up,
        may_reorder=may_reorder,
    )


def successors(state: OperationState) -> set[OperationState]:
    rule = RULES[state]
    after = {rule.successor, rule.successor_if_skipped, CANCELED if rule.may_cancel else None}
    return {state for state in after if state is not None}


def test_table_has_a_rule_for_every_state():
    assert RULES.keys() == set(OperationState)


def test_route_is_final_where_the_operation_no_longer_runs():
    """Clients follow an operation by these states, and read no table."""
    assert {state for state, rule in RULES.items() if not rule.runs} == ROUTE_FINAL


def test_states_are_never_entered_again():
    """The table has no circle, so an operation that keeps advancing ends."""

    def longest(state: OperationState, seen: tuple[OperationState, ...] = ()) -> int:
        assert state not in seen
        return 1 + max(
            (longest(successor, (*seen, state)) for successor in successors(state)), default=0
        )

    assert longest(PLAN) == 5


def test_children_open_when_the_operation_stops_running():
    """Parents are SEALED and children OPEN in the route exactly in the states after the new
    route.
    """
    for state, rule in RULES.items():
        opened = rule.child_state is PartitionState.OPEN
        assert opened == (rule.parent_state is PartitionState.SEALED)
        assert opened == (state not in RUNNING_STATES and state is not CANCELED)


def test_documentation_has_the_states_and_their_successors():
    text = ARCHITECTURE.read_text().split("| state | brokers are asked to |")[1].split("\n\n")[0]
    shown: dict[str, set[str]] = defaultdict(set)
    state = ""
    for line in text.splitlines()[2:]:
        name, _, after, _ = (cell.strip() for cell in line.strip("|").split("|"))
        state = name or state
        shown[state] |= {after} - {""}
    assert shown == {
        state.name: {each.name for each in successors(state)} for state in OperationState
    }


SILENT = {"alive": False}
OUTLOOKS = [
    (PLAN, [pending(BrokerAction.HOST), pending(BrokerAction.SEAL)], NextAction.REQUEST),
    (PLAN, [pending(BrokerAction.HOST, **SILENT), pending(BrokerAction.SEAL)], NextAction.WAIT),
    (
        PLAN,
        [pending(BrokerAction.HOST, **SILENT, given_up=True), pending(BrokerAction.SEAL)],
        NextAction.WAIT,
    ),
    (PLAN, [pending(BrokerAction.SEAL)], NextAction.ADVANCE),
    (PLAN, [pending(BrokerAction.SEAL), pending(BrokerAction.SEAL, **SILENT)], NextAction.WAIT),
    (PLAN, [pending(BrokerAction.SEAL, **SILENT, may_reorder=True)], NextAction.ADVANCE),
    (SEAL, [pending(BrokerAction.SEAL)], NextAction.REQUEST),
    (SEAL, [pending(BrokerAction.SEAL, **SILENT)], NextAction.WAIT),
    (SEAL, [pending(BrokerAction.SEAL, **SILENT, given_up=True)], NextAction.ADVANCE),
    (
        SEAL,
        [pending(BrokerAction.SEAL, **SILENT, given_up=True), pending(BrokerAction.SEAL, **SILENT)],
        NextAction.WAIT,
    ),
    (SEAL, [], NextAction.ADVANCE),
    (OPEN, [], NextAction.ADVANCE),
    (OPEN, [pending(BrokerAction.SEAL, **SILENT, may_reorder=True)], NextAction.ADVANCE),
    (OPEN, [pending(BrokerAction.ANNOUNCE)], NextAction.REQUEST),
    (OPEN, [pending(BrokerAction.ANNOUNCE, **SILENT, may_reorder=True)], NextAction.WAIT),
    (OPEN, [pending(BrokerAction.ANNOUNCE, **SILENT, given_up=True)], NextAction.ADVANCE),
    (
        FENCE,
        [pending(BrokerAction.SEAL, **SILENT, given_up=True, may_reorder=True)],
        NextAction.WAIT,
    ),
    (FENCE, [pending(BrokerAction.SEAL)], NextAction.REQUEST),
    (FENCE, [], NextAction.ADVANCE),
    (CANCELED, [pending(BrokerAction.SEAL, **SILENT)], NextAction.WAIT),
    (CANCELED, [pending(BrokerAction.SEAL)], NextAction.REQUEST),
    (CANCELED, [], NextAction.END),
    (DONE, [], NextAction.END),
]


@pytest.mark.parametrize(("state", "steps", "expected"), OUTLOOKS)
def test_next_action_follows_from_the_steps_that_are_not_done(
    state: OperationState, steps: Sequence[PendingStep], expected: NextAction
):
    """The state changes exactly if the next action is ADVANCE, and a reason is given exactly if it
    is WAIT.
    """
    assert next_action(state, steps) is expected
    assert (next_state(state, steps) is not state) == (expected is NextAction.ADVANCE)
    assert bool(waiting_reason(state, steps)) == (expected is NextAction.WAIT)


def test_open_is_left_for_fence_when_a_parent_is_left_behind():
    left = pending(BrokerAction.SEAL, **SILENT, may_reorder=True)
    lost = pending(BrokerAction.SEAL, **SILENT, given_up=True)
    assert next_state(OPEN, [left]) is FENCE
    assert next_state(OPEN, [lost]) is DONE, "no broker comes back to seal it"
    assert next_state(OPEN, [left, lost]) is FENCE


def test_plan_is_left_when_every_parent_is_said_to_be_sealable():
    parents = [pending(BrokerAction.SEAL)]
    assert next_state(PLAN, parents, sealable_ids=[]) is PLAN
    assert next_state(PLAN, parents, sealable_ids=[1]) is SEAL
