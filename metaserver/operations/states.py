"""The states of an operation on partitions, as a table: what brokers are asked for, what comes
next, and when. Pure.

    state     brokers are asked to       next      when
    PLAN      host the children          SEAL      all are hosted, and each parent can be sealed
                                         CANCELED  an operator cancels, at any time
    SEAL      seal the parents           OPEN      all but those that may be left behind are sealed
    OPEN      learn the consumer groups  DONE      all know them, and every parent has an end:
              made since they hosted               the route changes
                                         FENCE     the same, with a parent left behind unsealed
    FENCE     seal the parents left      DONE      all are sealed
    CANCELED  seal the children          -
    DONE      -                          -

Invariants
    A state is left for the next one only when `next_action` is PASS. Nothing else decides whether
    an operation can continue.
    From the first seal on an operation only moves forward: no state after PLAN can be canceled.
    A parent is left behind unsealed only before the route changes, and only if its broker is
    silent. Then either an operator has accepted the loss, or the subject allows reordered messages
    and an operator asked for it.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from ...protocol.operations import OperationState, StepAction
from ...protocol.routing import OrderStrategy, PartitionState


class Ask(enum.StrEnum):
    """The action that a broker is asked for."""

    HOST = "host"
    SEAL = "seal"
    ANNOUNCE = "announce"
    """To store the consumer groups that were made after the broker had hosted a child."""


ASK_OF_STEP = {StepAction.HOST: Ask.HOST, StepAction.SEAL: Ask.SEAL}


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """A row of the table."""

    asks: Ask | None
    """Action that brokers are asked for in this state, or None."""
    after: OperationState | None
    """The next state; None: this state is the last."""
    after_leaving: OperationState | None = None
    """The next state if a parent is left behind unsealed; None: the same as `after`."""
    runs: bool
    """True if the route has not changed yet, so that no other operation may begin on the
    subject.
    """
    checks_parents: bool = False
    """True if the next state also requires that every parent's broker confirms that it can seal."""
    may_cancel: bool = False
    """True if an operator may cancel the operation in this state."""
    parents: PartitionState
    """State of the operation's parents."""
    children: PartitionState
    """State of the operation's children."""


RULES: Mapping[OperationState, Rule] = {
    OperationState.PLAN: Rule(
        asks=Ask.HOST,
        after=OperationState.SEAL,
        runs=True,
        checks_parents=True,
        may_cancel=True,
        parents=PartitionState.OPEN,
        children=PartitionState.PLANNED,
    ),
    OperationState.SEAL: Rule(
        asks=Ask.SEAL,
        after=OperationState.OPEN,
        runs=True,
        parents=PartitionState.OPEN,
        children=PartitionState.PLANNED,
    ),
    OperationState.OPEN: Rule(
        asks=Ask.ANNOUNCE,
        after=OperationState.DONE,
        after_leaving=OperationState.FENCE,
        runs=True,
        parents=PartitionState.OPEN,
        children=PartitionState.PLANNED,
    ),
    OperationState.FENCE: Rule(
        asks=Ask.SEAL,
        after=OperationState.DONE,
        runs=False,
        parents=PartitionState.SEALED,
        children=PartitionState.OPEN,
    ),
    OperationState.DONE: Rule(
        asks=None,
        after=None,
        runs=False,
        parents=PartitionState.SEALED,
        children=PartitionState.OPEN,
    ),
    OperationState.CANCELED: Rule(
        asks=Ask.SEAL,
        after=None,
        runs=False,
        parents=PartitionState.OPEN,
        children=PartitionState.EXPIRED,
    ),
}
RUNNING = frozenset(state for state, rule in RULES.items() if rule.runs)
"""States in which no other operation may begin on the subject."""
ASKING = tuple(state for state, rule in RULES.items() if rule.asks is not None)
"""States in which brokers may have something to do."""
MOVING = tuple(state for state, rule in RULES.items() if rule.after is not None)
"""States that have a next state."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pending:
    """An unfinished step."""

    ask: Ask
    partition_id: int
    broker_group: str
    alive: bool
    """True if the broker reports itself."""
    given_up: bool = False
    """True if an operator has accepted the loss of the broker's data."""
    may_reorder: bool = False
    """True if an operator lets the operation continue without silent brokers, and the subject
    allows reordered messages.
    """

    @property
    def may_leave(self) -> bool:
        """True if the route may change without this step while the broker is silent."""
        match self.ask:
            case Ask.HOST:
                return False
            case Ask.SEAL:
                return self.given_up or self.may_reorder
            case Ask.ANNOUNCE:
                return self.given_up


class NextAction(enum.Enum):
    """What an operation can do next."""

    ASK = enum.auto()
    """A broker answers and has something to do."""
    PASS = enum.auto()
    """The operation can enter its next state; from PLAN, the parents' brokers are asked first."""
    WAIT = enum.auto()
    """The operation waits for silent brokers."""
    END = enum.auto()
    """The operation is over."""


def next_action(state: OperationState, pending: Iterable[Pending]) -> NextAction:
    """
    Return whether an operation can continue, and how.

    Args:
        pending: every unfinished step; in OPEN also an ANNOUNCE step of each child whose broker
            does not know every group.
    """
    pending = tuple(pending)
    asked = to_ask(state, pending)
    if any(step.alive for step in asked):
        return NextAction.ASK
    if asked or silent_parents(state, pending):
        return NextAction.WAIT
    return NextAction.END if RULES[state].after is None else NextAction.PASS


def to_ask(state: OperationState, pending: Iterable[Pending]) -> list[Pending]:
    """Return the steps for which the state waits: its own steps, except those of silent brokers
    that may be left behind.
    """
    rule = RULES[state]
    return [
        step
        for step in pending
        if step.ask is rule.asks and (step.alive or not (rule.runs and step.may_leave))
    ]


def silent_parents(state: OperationState, pending: Iterable[Pending]) -> list[str]:
    """
    Return the silent broker groups of parents, sorted; while there is one, no parent is sealed.

    A sealed parent accepts no messages, and its children accept none before all parents are sealed.
    """
    if not RULES[state].checks_parents:
        return []
    parents = (step for step in pending if step.ask is Ask.SEAL)
    return sorted({step.broker_group for step in parents if not (step.alive or step.may_leave)})


def parents_to_check(state: OperationState, pending: Iterable[Pending]) -> list[int]:
    """Return the parents whose brokers have to be asked whether they can seal them; none while the
    broker of a parent is silent.
    """
    pending = tuple(pending)
    if not RULES[state].checks_parents or silent_parents(state, pending):
        return []
    return [step.partition_id for step in pending if step.ask is Ask.SEAL and step.alive]


def next_state(
    state: OperationState, pending: Collection[Pending], *, sealable: Collection[int] | None = None
) -> OperationState:
    """
    Return the state to enter now, or `state` if the operation has to stay in it.

    Args:
        sealable: the parents whose brokers have just confirmed that they can seal them; None: all
            parents.
    """
    rule = RULES[state]
    if next_action(state, pending) is not NextAction.PASS or rule.after is None:
        return state
    if sealable is not None and not set(parents_to_check(state, pending)) <= set(sealable):
        return state
    if rule.after_leaving is not None and left_behind(pending):
        return rule.after_leaving
    return rule.after


def left_behind(pending: Iterable[Pending]) -> list[int]:
    """Return the parents that are unsealed when the route changes; they are sealed when their
    brokers return.
    """
    return [step.partition_id for step in pending if step.ask is Ask.SEAL and not step.given_up]


def waiting_reason(state: OperationState, pending: Collection[Pending]) -> str:
    """Return the reason why an operation waits, as far as it is known without asking a broker, or
    "".
    """
    if next_action(state, pending) is not NextAction.WAIT:
        return ""
    asked = to_ask(state, pending)
    return broker_silent(state, asked[0].broker_group) if asked else parents_silent(state, pending)


def broker_silent(state: OperationState, broker_group: str) -> str:
    """Return the reason for waiting while a broker with a step to do is silent."""
    blocked = "; the children wait until it is back and has sealed"
    return (
        f"broker group {broker_group!r} is silent{blocked if state is OperationState.SEAL else ''}"
    )


def parents_silent(state: OperationState, pending: Iterable[Pending]) -> str:
    """Return the reason for waiting while brokers of parents are silent, or ""."""
    groups = silent_parents(state, pending)
    if not groups:
        return ""
    return (
        f"silent: {', '.join(groups)}; no parent is sealed before the brokers of "
        f"all parents can seal"
    )


def unsealable(partition_id: int, broker_group: str, why: str) -> str:
    """Return the reason for waiting while the broker of a parent cannot seal it."""
    return (
        f"partition {partition_id} on {broker_group!r} cannot be sealed: {why}; "
        f"no parent is sealed before the brokers of all parents can seal"
    )


def may_reorder(order_strategy: OrderStrategy, *, static: bool) -> bool:
    """Return whether a subject allows reordered messages, which are declared in receipts."""
    return order_strategy is OrderStrategy.BEST_TRIED and not static


def parents_and_children(
    state: OperationState, steps: Iterable[tuple[int, StepAction]]
) -> tuple[list[int], list[int]]:
    """Return an operation's parents and children. A canceled operation has only children, to which
    all its steps belong.
    """
    rows = list(steps)
    if RULES[state].children is PartitionState.EXPIRED:
        return [], [partition_id for partition_id, _ in rows]
    sealed = [partition_id for partition_id, action in rows if action is StepAction.SEAL]
    return sealed, [partition_id for partition_id, action in rows if action is StepAction.HOST]
