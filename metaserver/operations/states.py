"""Defines the states of an operation as a table: what brokers are asked to do in each state, the
next state, and the condition for entering it. Pure.

    state     brokers are asked to       next      when
    PLAN      host the children          SEAL      all are hosted, and each parent can be sealed
                                         CANCELED  an operator cancels, at any time
    SEAL      seal the parents           OPEN      all are sealed, except those that may be skipped
    OPEN      store the groups created   DONE      all have stored them, and every parent has an
              since they hosted                    end: the route changes
                                         FENCE     the same, but a parent was skipped
    FENCE     seal the skipped parents   DONE      all are sealed
    CANCELED  seal the children          -
    DONE      -                          -

Invariants
    The next state is entered only if `next_action` returns ADVANCE. Nothing else decides whether an
    operation can continue.
    After the first seal, an operation only moves forward: it cannot be canceled in any state after
    PLAN.
    A parent may only be skipped, that is, left unsealed when the route changes, if its broker is
    silent. In addition, either an operator must have accepted the loss of the broker, or the
    subject must allow reordered messages and an operator must have requested the skip.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from ...protocol.operations import OperationState, StepAction
from ...protocol.routing import OrderStrategy, PartitionState


class BrokerAction(enum.StrEnum):
    """An action that a broker is asked to perform."""

    HOST = "host"
    SEAL = "seal"
    ANNOUNCE = "announce"
    """Store the consumer groups that were created after the broker had begun to host a child."""


ACTION_OF_STEP = {StepAction.HOST: BrokerAction.HOST, StepAction.SEAL: BrokerAction.SEAL}


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One row of the table: the rules for one state."""

    action: BrokerAction | None
    """The action that brokers are asked to perform in this state, or None."""
    successor: OperationState | None
    """The next state; None for a final state."""
    successor_if_skipped: OperationState | None = None
    """The next state if a parent was skipped; None if it is the same as `successor`."""
    runs: bool
    """True if the route has not changed yet, so that no other operation can run on the subject."""
    checks_parents: bool = False
    """True if every parent's broker must first confirm that it can seal."""
    may_cancel: bool = False
    """True if an operator may cancel the operation in this state."""
    parent_state: PartitionState
    """Partition state of the operation's parents."""
    child_state: PartitionState
    """Partition state of the operation's children."""


RULES: Mapping[OperationState, Rule] = {
    OperationState.PLAN: Rule(
        action=BrokerAction.HOST,
        successor=OperationState.SEAL,
        runs=True,
        checks_parents=True,
        may_cancel=True,
        parent_state=PartitionState.OPEN,
        child_state=PartitionState.PLANNED,
    ),
    OperationState.SEAL: Rule(
        action=BrokerAction.SEAL,
        successor=OperationState.OPEN,
        runs=True,
        parent_state=PartitionState.OPEN,
        child_state=PartitionState.PLANNED,
    ),
    OperationState.OPEN: Rule(
        action=BrokerAction.ANNOUNCE,
        successor=OperationState.DONE,
        successor_if_skipped=OperationState.FENCE,
        runs=True,
        parent_state=PartitionState.OPEN,
        child_state=PartitionState.PLANNED,
    ),
    OperationState.FENCE: Rule(
        action=BrokerAction.SEAL,
        successor=OperationState.DONE,
        runs=False,
        parent_state=PartitionState.SEALED,
        child_state=PartitionState.OPEN,
    ),
    OperationState.DONE: Rule(
        action=None,
        successor=None,
        runs=False,
        parent_state=PartitionState.SEALED,
        child_state=PartitionState.OPEN,
    ),
    OperationState.CANCELED: Rule(
        action=BrokerAction.SEAL,
        successor=None,
        runs=False,
        parent_state=PartitionState.OPEN,
        child_state=PartitionState.EXPIRED,
    ),
}
RUNNING_STATES = frozenset(state for state, rule in RULES.items() if rule.runs)
"""States in which no other operation can begin on the subject."""
ACTIVE_STATES = tuple(state for state, rule in RULES.items() if rule.action is not None)
"""States in which brokers may have work."""
ADVANCING_STATES = tuple(state for state, rule in RULES.items() if rule.successor is not None)
"""States that have a next state."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingStep:
    """An unfinished step of an operation."""

    action: BrokerAction
    partition_id: int
    broker_group: str
    alive: bool
    """True if the broker is not silent."""
    given_up: bool = False
    """True if an operator has accepted the loss of the broker's data."""
    may_reorder: bool = False
    """True if an operator has allowed the operation to continue without silent brokers, and the
    subject allows reordered messages.
    """

    @property
    def may_skip(self) -> bool:
        """True if the route may change without this step while the broker is silent."""
        match self.action:
            case BrokerAction.HOST:
                return False
            case BrokerAction.SEAL:
                return self.given_up or self.may_reorder
            case BrokerAction.ANNOUNCE:
                return self.given_up


class NextAction(enum.Enum):
    """What an operation can do next."""

    REQUEST = enum.auto()
    """A live broker has work."""
    ADVANCE = enum.auto()
    """The operation can enter its next state; in PLAN, only if the parents' brokers confirm it."""
    WAIT = enum.auto()
    """The operation is waiting for silent brokers."""
    END = enum.auto()
    """The operation is finished."""


def next_action(state: OperationState, pending: Iterable[PendingStep]) -> NextAction:
    """
    Return what an operation can do next.

    Args:
        pending: all unfinished steps; in OPEN, these include an ANNOUNCE step for each child whose
            broker does not know every group.
    """
    pending = tuple(pending)
    requested_steps = steps_to_request(state, pending)
    if any(step.alive for step in requested_steps):
        return NextAction.REQUEST
    if requested_steps or silent_parents(state, pending):
        return NextAction.WAIT
    return NextAction.END if RULES[state].successor is None else NextAction.ADVANCE


def steps_to_request(state: OperationState, pending: Iterable[PendingStep]) -> list[PendingStep]:
    """Return the steps that must be performed before the next state, excluding those of silent
    brokers that may be skipped.
    """
    rule = RULES[state]
    return [
        step
        for step in pending
        if step.action is rule.action and (step.alive or not (rule.runs and step.may_skip))
    ]


def silent_parents(state: OperationState, pending: Iterable[PendingStep]) -> list[str]:
    """
    Return the silent broker groups that prevent all parents from being sealed, sorted.

    No parent is sealed while there are any, because a sealed parent accepts no messages, and its
    children accept none until all parents are sealed.
    """
    if not RULES[state].checks_parents:
        return []
    parents = (step for step in pending if step.action is BrokerAction.SEAL)
    return sorted({step.broker_group for step in parents if not (step.alive or step.may_skip)})


def parents_to_check(state: OperationState, pending: Iterable[PendingStep]) -> list[int]:
    """Return the parents whose brokers must confirm that they can seal. The list is empty while the
    broker of any parent is silent.
    """
    pending = tuple(pending)
    if not RULES[state].checks_parents or silent_parents(state, pending):
        return []
    return [
        step.partition_id for step in pending if step.action is BrokerAction.SEAL and step.alive
    ]


def next_state(
    state: OperationState,
    pending: Collection[PendingStep],
    *,
    sealable_ids: Collection[int] | None = None,
) -> OperationState:
    """
    Return the state to enter now, or `state` if the operation cannot advance.

    Args:
        sealable_ids: ids of the parents whose brokers have just confirmed that they can seal; None
            means all parents.
    """
    rule = RULES[state]
    if next_action(state, pending) is not NextAction.ADVANCE or rule.successor is None:
        return state
    if sealable_ids is not None and not set(parents_to_check(state, pending)) <= set(sealable_ids):
        return state
    if rule.successor_if_skipped is not None and skipped_parents(pending):
        return rule.successor_if_skipped
    return rule.successor


def skipped_parents(pending: Iterable[PendingStep]) -> list[int]:
    """Return the parents that are still unsealed when the route changes. They are sealed when their
    brokers return.
    """
    return [
        step.partition_id
        for step in pending
        if step.action is BrokerAction.SEAL and not step.given_up
    ]


def waiting_reason(state: OperationState, pending: Collection[PendingStep]) -> str:
    """Return the reason why an operation is waiting, as far as it is known without asking a broker,
    or "".
    """
    if next_action(state, pending) is not NextAction.WAIT:
        return ""
    requested_steps = steps_to_request(state, pending)
    return (
        describe_silent_broker(state, requested_steps[0].broker_group)
        if requested_steps
        else describe_silent_parents(state, pending)
    )


def describe_silent_broker(state: OperationState, broker_group: str) -> str:
    """Return the reason for waiting if a broker with an unfinished step is silent."""
    note = "; the children wait until it is back and has sealed"
    return f"broker group {broker_group!r} is silent{note if state is OperationState.SEAL else ''}"


def describe_silent_parents(state: OperationState, pending: Iterable[PendingStep]) -> str:
    """Return the reason for waiting if the broker of a parent is silent, or ""."""
    groups = silent_parents(state, pending)
    if not groups:
        return ""
    return (
        f"silent: {', '.join(groups)}; no parent is sealed before the brokers of "
        f"all parents can seal"
    )


def describe_unsealable(partition_id: int, broker_group: str, reason: str) -> str:
    """Return the reason for waiting if the broker of a parent cannot seal it."""
    return (
        f"partition {partition_id} on {broker_group!r} cannot be sealed: {reason}; "
        f"no parent is sealed before the brokers of all parents can seal"
    )


def may_reorder(order_strategy: OrderStrategy, *, static: bool) -> bool:
    """Return True if a subject allows reordered messages, which are indicated in receipts."""
    return order_strategy is OrderStrategy.BEST_TRIED and not static


def split_parents_and_children(
    state: OperationState, steps: Iterable[tuple[int, StepAction]]
) -> tuple[list[int], list[int]]:
    """Return the ids of an operation's parents and children. All steps of a canceled operation
    belong to children.
    """
    rows = list(steps)
    if RULES[state].child_state is PartitionState.EXPIRED:
        return [], [partition_id for partition_id, _ in rows]
    parent_ids = [partition_id for partition_id, action in rows if action is StepAction.SEAL]
    return parent_ids, [partition_id for partition_id, action in rows if action is StepAction.HOST]
