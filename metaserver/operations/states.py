"""The states of an operation on partitions, as a table: what brokers are asked for, what comes
next, and when.  Pure.

    state     brokers are asked to        next      when                                                        moved by
    PLAN      host the children           SEAL      all are hosted, and each parent's broker says it can seal   a driver
                                          CANCELED  at any time                                                 an operator
    SEAL      seal the parents            OPEN      all are sealed, but for those that may be left behind       a driver
    OPEN      learn the consumer groups   DONE      all know them: the route changes; every parent has an end   a driver
              made since they hosted      FENCE     the same, with a parent left behind unsealed                a driver
    FENCE     seal the parents left       DONE      all are sealed                                              a driver
    CANCELED  seal the children           -
    DONE      -                           -

Invariants
    A state is left for the next one only when `outlook` is PASS.  Nothing else decides whether an
    operation can continue. From the first seal on an operation only moves forward: no state after
    PLAN can be canceled. A parent is left behind unsealed only before the route changes, and only
    if its broker is silent. Then either an operator has accepted the loss, or the subject allows
    reordered messages and an operator asked for it.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from ...protocol.operations import OperationState, StepAction
from ...protocol.routing import OrderStrategy, PartitionState


class Ask(enum.StrEnum):
    """What a broker is asked for."""

    HOST = "host"
    SEAL = "seal"
    TELL = "tell"
    """Store the consumer groups that were made after the broker had hosted a child."""


ASK_OF_STEP = {StepAction.HOST: Ask.HOST, StepAction.SEAL: Ask.SEAL}


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One row of the table."""

    asks: Ask | None
    """What brokers are asked for in this state; None: nothing."""
    after: OperationState | None
    """The next state; None: this state is the last."""
    after_leaving: OperationState | None = None
    """The next state if a parent is left behind unsealed; None: `after`."""
    runs: bool
    """Whether the route is still to change; no other operation may begin on the subject
    meanwhile.
    """
    checks_parents: bool = False
    """Whether the next state also needs an answer of every parent's broker: it can seal the
    parent.
    """
    may_cancel: bool = False
    """Whether an operator may cancel the operation in this state."""
    parents: PartitionState
    """The state of the operation's parents."""
    children: PartitionState
    """The state of the operation's children."""


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
        asks=Ask.TELL,
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
"""The states in which no other operation may begin on the subject."""
ASKING = tuple(state for state, rule in RULES.items() if rule.asks is not None)
"""The states in which brokers may have something to do."""
MOVING = tuple(state for state, rule in RULES.items() if rule.after is not None)
"""The states that are left for another one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pending:
    """A step that is not done."""

    ask: Ask
    partition_id: int
    broker_group: str
    alive: bool
    """The broker reports itself."""
    given_up: bool = False
    """An operator has accepted the loss of what the broker has."""
    may_reorder: bool = False
    """An operator lets the operation continue without silent brokers, and the subject allows
    reordered messages.
    """

    @property
    def may_leave(self) -> bool:
        """Whether the route may change without this step while the broker is silent."""
        match self.ask:
            case Ask.HOST:
                return False
            case Ask.SEAL:
                return self.given_up or self.may_reorder
            case Ask.TELL:
                return self.given_up


class Outlook(enum.Enum):
    """What an operation can do now."""

    ASK = enum.auto()
    """A broker answers and has something to do."""
    PASS = enum.auto()
    """The operation can enter its next state; from PLAN, the parents' brokers are asked first."""
    WAIT = enum.auto()
    """The operation waits for silent brokers."""
    END = enum.auto()
    """The operation is over."""


def outlook(state: OperationState, pending: Iterable[Pending]) -> Outlook:
    """
    Return whether an operation can continue, and how.

    Args:
        pending: every step that is not done; in OPEN also a TELL step of each child whose broker
            does not know every group.
    """
    pending = tuple(pending)
    asked = to_ask(state, pending)
    if any(step.alive for step in asked):
        return Outlook.ASK
    if asked or silent_parents(state, pending):
        return Outlook.WAIT
    return Outlook.END if RULES[state].after is None else Outlook.PASS


def to_ask(state: OperationState, pending: Iterable[Pending]) -> list[Pending]:
    """The steps that the state waits for: its own steps, but for those of silent brokers that may
    be left behind.
    """
    rule = RULES[state]
    return [
        step
        for step in pending
        if step.ask is rule.asks and (step.alive or not (rule.runs and step.may_leave))
    ]


def silent_parents(state: OperationState, pending: Iterable[Pending]) -> list[str]:
    """
    The silent broker groups of parents, sorted; while there is one, no parent is sealed.

    A sealed parent takes no messages, and its children take none before all parents are sealed.
    """
    if not RULES[state].checks_parents:
        return []
    parents = (step for step in pending if step.ask is Ask.SEAL)
    return sorted({step.broker_group for step in parents if not (step.alive or step.may_leave)})


def parents_to_check(state: OperationState, pending: Iterable[Pending]) -> list[int]:
    """The parents whose brokers are to be asked whether they can seal them; none while a parent's
    broker is silent.
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
        sealable: the parents whose brokers have just said that they can seal them; None: all
            parents.
    """
    rule = RULES[state]
    if outlook(state, pending) is not Outlook.PASS or rule.after is None:
        return state
    if sealable is not None and not set(parents_to_check(state, pending)) <= set(sealable):
        return state
    if rule.after_leaving is not None and left_behind(pending):
        return rule.after_leaving
    return rule.after


def left_behind(pending: Iterable[Pending]) -> list[int]:
    """The parents that are unsealed when the route changes.  They are sealed when their brokers are
    back.
    """
    return [step.partition_id for step in pending if step.ask is Ask.SEAL and not step.given_up]


def waiting_reason(state: OperationState, pending: Collection[Pending]) -> str:
    """The reason why an operation waits, as far as it is known without asking a broker; "" if it
    does not wait.
    """
    if outlook(state, pending) is not Outlook.WAIT:
        return ""
    asked = to_ask(state, pending)
    return broker_silent(state, asked[0].broker_group) if asked else parents_silent(state, pending)


def broker_silent(state: OperationState, broker_group: str) -> str:
    """The reason for waiting while a broker with a step to do is silent."""
    blocked = "; the children wait until it is back and has sealed"
    return (
        f"broker group {broker_group!r} is silent{blocked if state is OperationState.SEAL else ''}"
    )


def parents_silent(state: OperationState, pending: Iterable[Pending]) -> str:
    """The reason for waiting while brokers of parents are silent; "" if none is silent."""
    groups = silent_parents(state, pending)
    if not groups:
        return ""
    return (
        f"silent: {', '.join(groups)}; no parent is sealed before the brokers of "
        f"all parents can seal"
    )


def unsealable(partition_id: int, broker_group: str, why: str) -> str:
    """The reason for waiting while the broker of a parent cannot seal it."""
    return (
        f"partition {partition_id} on {broker_group!r} cannot be sealed: {why}; "
        f"no parent is sealed before the brokers of all parents can seal"
    )


def may_reorder(order_strategy: OrderStrategy, *, static: bool) -> bool:
    """Whether a subject allows reordered messages; they are declared in receipts."""
    return order_strategy is OrderStrategy.BEST_TRIED and not static


def parents_and_children(
    state: OperationState, steps: Iterable[tuple[int, StepAction]]
) -> tuple[list[int], list[int]]:
    """Return an operation's parents and children.  A canceled operation has children alone: all its
    steps are theirs.
    """
    rows = list(steps)
    if RULES[state].children is PartitionState.EXPIRED:
        return [], [partition_id for partition_id, _ in rows]
    sealed = [partition_id for partition_id, action in rows if action is StepAction.SEAL]
    return sealed, [partition_id for partition_id, action in rows if action is StepAction.HOST]
