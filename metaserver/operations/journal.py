"""Rows of operations under way: claimed, their steps noted, moved on from state to state.  SQL, synchronous.

Invariants
    An operation moves on only when every step of its state is noted, in one transaction for each state.
    The route changes in one transaction: parents SEALED, children OPEN, version + 1.
    No child opens before its broker has every consumer group of the subject on its disk, or its data folder is refused
    because the loss of it is accepted.
    Every function may be called again: what is done stays done.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from ...protocol.control import Retention
from ...protocol.errors import OperationForwardError, OperationUnknownError
from ...protocol.ids import MAX_I64, Subject
from ...protocol.operations import OperationState, StepAction
from ...protocol.routing import OrderStrategy, Partition, PartitionState, route_table
from ..cluster.heard import store_heard, unheard_children
from ..cluster.losses import lose_partitions, refuse_folders
from ..cluster.partitions import BY_ID, PartitionFilter, read_partitions
from ..cluster.queues import set_logic_starts
from ..cluster.subjects import read_route
from ..sql.dialect import now_ms
from ..sql.schema import brokers, groups, operations, partitions, steps, subjects

PROBLEM_CHARS_MAX = 1_024
_ACTION = {
    OperationState.PLAN: StepAction.HOST,
    OperationState.SEAL: StepAction.SEAL,
    OperationState.FENCE: StepAction.SEAL,
    OperationState.CANCELED: StepAction.SEAL,
}
"""What the brokers are asked for in a state."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """An operation as its driver needs it."""

    operation_id: int
    subject_id: int
    subject: Subject
    order_strategy: OrderStrategy
    partitions_wanted: int
    """Those the subject was created with."""
    retention: Retention
    static: bool
    """Of the subject: the children go on at the logic offsets at which their parents end, or behind their loss."""
    state: OperationState
    may_forsake: bool
    """The route may change although the silent brokers have not sealed: the operator said so, and the subject, not
    static, allows messages to be reordered; or the losses of all that they have were accepted."""
    todo: tuple[Partition, ...]
    """What has to be hosted or sealed in this state, or, in OPEN, to hear of consumer groups that were made since it was
    hosted; without an address its broker is silent."""
    groups: tuple[tuple[int, str], ...] = ()
    """(id, name) of every consumer group of the subject, of which the brokers of the children have to hear."""
    held: tuple[str, ...] = ()
    """The silent broker groups for which it waits before anything is sealed: else some parents would take no
    messages and their children not yet."""
    sources: tuple[Partition, ...] = ()
    """The parents whose brokers are to say, before anything is sealed, that they could."""
    left_unheard: tuple[int, ...] = ()
    """The children that open although their brokers have not heard of each group: their loss is accepted, and their
    broker groups are silent."""


_claimed = (
    sa.update(operations)
    .where(
        operations.c.operation_id == sa.bindparam("of_operation"),
        sa.or_(operations.c.driver == sa.bindparam("by"), operations.c.driven_until <= now_ms()),
        operations.c.state != OperationState.DONE,
    )
    .values(driver=sa.bindparam("by"), driven_until=now_ms() + sa.bindparam("for_ms"))
)


def claim_operation(
    connection: Connection, operation_id: int, *, driver: str, lease_ms: int
) -> Operation | None:
    """An unfinished operation, in the hands of `driver` for `lease_ms`; None if it is done or another's."""
    mine = {"of_operation": operation_id, "by": driver, "for_ms": lease_ms}
    if not connection.execute(_claimed, mine).rowcount:
        return None
    return read_operation(connection, operation_id)


_operation = (
    sa.select(
        operations,
        subjects.c.name,
        subjects.c.order_strategy,
        subjects.c.partitions_wanted,
        subjects.c.retention,
        subjects.c.static,
    )
    .join(subjects, subjects.c.subject_id == operations.c.subject_id)
    .where(operations.c.operation_id == sa.bindparam("of_operation"))
)


def read_operation(connection: Connection, operation_id: int) -> Operation:
    """An operation and what is left to do in its present state."""
    row = connection.execute(_operation, {"of_operation": operation_id}).one()
    state = OperationState(row.state)
    todo: tuple[Partition, ...] = ()
    left_unheard: tuple[int, ...] = ()
    held: set[str] = set()
    sources: tuple[Partition, ...] = ()
    parents = _undone(connection, operation_id, StepAction.SEAL)
    accepted = set(connection.execute(_accepted, {"of_operation": operation_id}).scalars())
    waits = [one for one in parents if one.partition_id not in accepted]
    if _may_forsake(row):
        waits = []
    if state in _ACTION:
        todo = _undone(connection, operation_id, _ACTION[state])
    elif state is OperationState.OPEN:
        todo, left_unheard = _unheard(connection, row.subject_id, operation_id)
    if state is OperationState.PLAN:
        held = {one.broker_group for one in waits if one.address is None}
        sources = () if held else tuple(one for one in parents if one.address is not None)
    return Operation(
        operation_id=row.operation_id,
        subject_id=row.subject_id,
        subject=Subject(row.name),
        order_strategy=OrderStrategy(row.order_strategy),
        partitions_wanted=row.partitions_wanted,
        retention=Retention(row.retention),
        static=row.static,
        state=state,
        groups=_named_groups(connection, row.subject_id),
        may_forsake=not waits,
        todo=todo,
        held=tuple(sorted(held)),
        sources=sources,
        left_unheard=left_unheard,
    )


_to_do = PartitionFilter(
    partitions.c.partition_id.in_(
        sa.select(steps.c.partition_id).where(
            steps.c.operation_id == sa.bindparam("of_operation"),
            steps.c.action == sa.bindparam("what"),
            sa.not_(steps.c.done),
        )
    )
)


def _undone(connection: Connection, operation_id: int, action: StepAction) -> tuple[Partition, ...]:
    return read_partitions(connection, _to_do, of_operation=operation_id, what=action)


_children = sa.select(steps.c.partition_id, steps.c.given_up).where(
    steps.c.operation_id == sa.bindparam("of_operation"), steps.c.action == StepAction.HOST
)


def _unheard(
    connection: Connection, subject_id: int, operation_id: int
) -> tuple[tuple[Partition, ...], tuple[int, ...]]:
    """
    The children whose brokers have not heard of each group of the subject.

    Returns:
        Those that have to hear, and the ids of those that are on a silent broker whose loss is accepted.
    """
    rows = connection.execute(_children, {"of_operation": operation_id})
    given_up = {row.partition_id: row.given_up for row in rows}
    missing = unheard_children(connection, subject_id, list(given_up))
    children = read_partitions(connection, BY_ID, ids=missing) if missing else ()
    lost = tuple(
        one.partition_id for one in children if one.address is None and given_up[one.partition_id]
    )
    return tuple(one for one in children if one.partition_id not in lost), lost


_named = (
    sa.select(groups.c.group_id, groups.c.name)
    .where(groups.c.subject_id == sa.bindparam("of_subject"))
    .order_by(groups.c.group_id)
)


def _named_groups(connection: Connection, subject_id: int) -> tuple[tuple[int, str], ...]:
    rows = connection.execute(_named, {"of_subject": subject_id})
    return tuple((row.group_id, row.name) for row in rows)


def _may_forsake(row: sa.Row[Any]) -> bool:
    """May whatever silent brokers have be read after what comes next."""
    best_tried = row.order_strategy == OrderStrategy.BEST_TRIED and not row.static
    return bool(row.without_source) and best_tried


_accepted = sa.select(steps.c.partition_id).where(
    steps.c.operation_id == sa.bindparam("of_operation"), steps.c.given_up
)


_sealed_at = (
    sa.update(partitions)
    .where(partitions.c.partition_id == sa.bindparam("of_partition"))
    .values(end_offset=sa.bindparam("end"))
)
_step_done = (
    sa.update(steps)
    .where(
        steps.c.operation_id == sa.bindparam("of_operation"),
        steps.c.partition_id.in_(sa.bindparam("ids")),
        steps.c.action == sa.bindparam("what"),
    )
    .values(done=True)
)
_set_operation = sa.update(operations).where(
    operations.c.operation_id == sa.bindparam("of_operation")
)
"""Sets the columns that are named in its parameters."""


def note_steps(
    connection: Connection,
    operation_id: int,
    done: Mapping[int, int | None],
    problem: str,
    *,
    heard: Collection[int] = (),
) -> None:
    """
    These partitions are hosted, or sealed at an end offset; and why the others are not.

    Args:
        done: partition id → end offset of a sealed one, None of a hosted one.
        heard: ids of the consumer groups that the brokers of the hosted ones have on their disks.
    """
    # Its row before those of its steps, as a cancel does.
    state = _lock_operation(connection, operation_id)
    for partition_id, end_offset in sorted(done.items()):
        if end_offset is not None:
            connection.execute(_sealed_at, {"of_partition": partition_id, "end": end_offset})
    hosted = [partition_id for partition_id, end_offset in done.items() if end_offset is None]
    store_heard(connection, {one: list(heard) for one in sorted(hosted)})
    # By its action: an operation that was canceled meanwhile has its children to seal.
    for action in StepAction:
        ids = [key for key, end in done.items() if (end is None) is (action is StepAction.HOST)]
        which = {"of_operation": operation_id, "ids": ids, "what": action}
        connection.execute(_step_done, which)
    if state is OperationState.DONE:
        problem = ""  # whoever drove it too was late
    said = {"of_operation": operation_id, "problem": problem[:PROBLEM_CHARS_MAX]}
    connection.execute(_set_operation, said)


_subject_id = sa.select(operations.c.subject_id).where(
    operations.c.operation_id == sa.bindparam("of_operation")
)
_subject_locked = (
    sa.select(subjects.c.subject_id)
    .where(subjects.c.subject_id == sa.bindparam("of_subject"))
    .with_for_update()
)
_state_locked = (
    sa.select(operations.c.state)
    .where(operations.c.operation_id == sa.bindparam("of_operation"))
    .with_for_update()
)


def _lock_operation(connection: Connection, operation_id: int) -> OperationState | None:
    """The state of an operation, which stays so until the transaction ends; None if there is none."""
    here = {"of_operation": operation_id}
    subject_id = connection.execute(_subject_id, here).scalar_one_or_none()
    if subject_id is None:
        return None
    # Locked in the order in which an operation is begun: the subject, then what runs on it.
    connection.execute(_subject_locked, {"of_subject": subject_id}).one()
    return OperationState(connection.execute(_state_locked, here).scalar_one())


def cancel_operation(connection: Connection, operation_id: int) -> None:
    """
    Undo an operation of which nothing is sealed yet; again changes nothing.

    Its children are never opened.  A broker may host one already, or be asked to this moment: all are sealed there.

    Raises:
        OperationUnknownError
        OperationForwardError: it is past PLAN.
    """
    known = 0 < operation_id <= MAX_I64
    state = _lock_operation(connection, operation_id) if known else None
    if state is None:
        raise OperationUnknownError(operation_id=operation_id)
    if state is OperationState.CANCELED:
        return
    if state is not OperationState.PLAN:
        raise OperationForwardError(operation_id=operation_id, state=state.value)
    mine = steps.c.operation_id == operation_id
    children = sa.select(steps.c.partition_id).where(mine, steps.c.action == StepAction.HOST)
    connection.execute(
        sa.update(partitions)
        .where(partitions.c.partition_id.in_(children))
        .values(state=PartitionState.EXPIRED)
    )
    connection.execute(sa.delete(steps).where(mine, steps.c.action == StepAction.SEAL))
    connection.execute(sa.update(steps).where(mine).values(action=StepAction.SEAL, done=False))
    canceled = {"state": OperationState.CANCELED, "problem": "", "running": None}
    free = {"driver": None, "driven_until": 0}
    connection.execute(_set_operation, {"of_operation": operation_id} | canceled | free)


def advance_operation(
    connection: Connection, operation_id: int, *, sealable: Collection[int] | None = None
) -> OperationState:
    """
    Enter the next state if everything of this one is done; the state it is in now.

    Args:
        sealable: the parents whose brokers have just said that they could seal them; None: all have.
    """
    _lock_operation(connection, operation_id)
    operation = read_operation(connection, operation_id)
    silent = all(one.address is None for one in operation.todo)
    asked = sealable is None or {one.partition_id for one in operation.sources} <= set(sealable)
    after = operation.state
    match operation.state:
        case OperationState.PLAN if asked and not (operation.todo or operation.held):
            after = OperationState.SEAL
        case OperationState.SEAL if not operation.todo or (silent and operation.may_forsake):
            after = OperationState.OPEN
        case OperationState.OPEN if not operation.todo:
            after = _open(connection, operation)
        case OperationState.FENCE if not operation.todo:
            after = OperationState.DONE
    values: dict[str, object] = {"of_operation": operation_id, "state": after}
    if after is not operation.state:
        values["problem"] = ""
    if after in {OperationState.DONE, OperationState.FENCE}:
        values["running"] = None
    connection.execute(_set_operation, values)
    return after


_set_partitions = sa.update(partitions).where(partitions.c.partition_id.in_(sa.bindparam("ids")))
"""Sets the columns that are named in its parameters."""
_steps = sa.select(steps).where(steps.c.operation_id == sa.bindparam("of_operation"))
_route_raised = (
    sa.update(subjects)
    .where(subjects.c.subject_id == sa.bindparam("of_subject"))
    .values(route_version=subjects.c.route_version + 1)
)


def _open(connection: Connection, operation: Operation) -> OperationState:
    """Change the route; FENCE if a parent's end is not known, else DONE."""
    rows = connection.execute(_steps, {"of_operation": operation.operation_id}).all()
    sealed = [row.partition_id for row in rows if row.action == StepAction.SEAL]
    abandoned = [row.partition_id for row in rows if row.partition_id in sealed and not row.done]
    children = [row.partition_id for row in rows if row.action == StepAction.HOST]
    connection.execute(_set_partitions, {"ids": sealed, "state": PartitionState.SEALED})
    # Their ends are not known until their brokers are back and say them, not even if they had said them before.
    left = {"abandoned": True, "end_offset": None}
    lost = [row.partition_id for row in rows if row.partition_id in abandoned and row.given_up]
    lose_partitions(connection, lost)
    abandoned = [one for one in abandoned if one not in lost]
    connection.execute(_set_partitions, {"ids": abandoned, **left})
    connection.execute(_set_partitions, {"ids": children, "state": PartitionState.OPEN})
    # Else their brokers could come back and serve them.
    refuse_folders(connection, operation.left_unheard)
    if operation.static:
        set_logic_starts(connection, children)
    connection.execute(_route_raised, {"of_subject": operation.subject_id})
    route_table(read_route(connection, operation.subject))  # each logical partition has one open
    return OperationState.FENCE if abandoned else OperationState.DONE


def let_go(connection: Connection, operation_id: int, *, driver: str, pause_ms: int = 0) -> None:
    """The driver stops; another may go on at once, or after a pause."""
    mine = sa.and_(operations.c.operation_id == operation_id, operations.c.driver == driver)
    until = now_ms() + pause_ms
    connection.execute(sa.update(operations).where(mine).values(driven_until=until))


_left = (
    sa.select(
        operations.c.operation_id,
        operations.c.state,
        operations.c.without_source,
        subjects.c.order_strategy,
        subjects.c.static,
        steps.c.action,
        steps.c.partition_id,
        steps.c.given_up,
        (brokers.c.expires_at > now_ms()).label("alive"),
    )
    .select_from(operations)
    .join(subjects, subjects.c.subject_id == operations.c.subject_id)
    .outerjoin(
        steps,
        sa.and_(steps.c.operation_id == operations.c.operation_id, sa.not_(steps.c.done)),
    )
    .outerjoin(partitions, partitions.c.partition_id == steps.c.partition_id)
    .outerjoin(brokers, brokers.c.broker_group == partitions.c.broker_group)
    .where(
        operations.c.state != OperationState.DONE,
        operations.c.driven_until <= now_ms(),
        sa.or_(operations.c.state != OperationState.CANCELED, steps.c.partition_id.is_not(None)),
    )
    .order_by(operations.c.driven_until, operations.c.operation_id)
)


def idle_operations(connection: Connection) -> list[int]:
    """The unfinished operations that nobody drives and that can go on; first those that have waited for longest."""
    left: dict[int, list[sa.Row[Any]]] = {}
    for row in connection.execute(_left):
        left.setdefault(row.operation_id, []).append(row)
    return [one for one, todo in left.items() if _can_go_on(todo)]


def _can_go_on(todo: list[sa.Row[Any]]) -> bool:
    """Is there a broker to ask, or nothing to ask any more; `todo` are the undone steps, or one row without."""
    state = OperationState(todo[0].state)
    leaves = [_may_forsake(row) or row.given_up for row in todo]
    now = [bool(row.alive) for row in todo if row.action == _ACTION.get(state, "")]
    if state is OperationState.PLAN and not now:
        return all(row.alive or left for row, left in zip(todo, leaves, strict=True))
    return not now or any(now) or (all(leaves) and state is OperationState.SEAL)


def groups_of(connection: Connection, subject_id: int) -> list[int]:
    """The consumer groups of a subject."""
    found = sa.select(groups.c.group_id).where(groups.c.subject_id == subject_id)
    return list(connection.execute(found).scalars())
