"""The journal of operations: claims them, stores their steps, and moves them from state to state.
SQL, synchronous.

Invariants
    An operation enters a state in the transaction that stores the last step of the previous state:
    see `states.py`.
    The route changes in one transaction: parents SEALED, children OPEN, version + 1. A publication
    of a hidden subject with a cut has no children: its steps seal the hidden partitions, which are
    parents of open ones, and are visible from then on.
    A child opens after its broker has stored every consumer group of the subject, or after the loss
    of the broker's data folder was accepted, so that the folder is refused.
    Every function may be repeated; a repeat changes nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from ...protocol.control import Retention
from ...protocol.errors import ConflictError, NotFoundError, Reason
from ...protocol.ids import MAX_I64, Subject
from ...protocol.limits import MESSAGE_BYTES_MAX
from ...protocol.operations import OperationKind, OperationState, StepAction
from ...protocol.routing import OrderStrategy, Partition, PartitionState, route_table
from ..cluster.brokers import read_openings
from ..cluster.heard import store_heard, unheard_children
from ..cluster.losses import lose_partitions, refuse_folders
from ..cluster.partitions import HOSTED_BY_ID, read_partitions
from ..cluster.queues import set_logic_starts, shift_logic_offsets
from ..cluster.removals import plan_removals
from ..cluster.subjects import read_route
from ..cluster.unfinished import UNFINISHED
from ..sql.dialect import now_ms
from ..sql.schema import brokers, groups, operations, partitions, steps, subjects
from .states import (
    ASK_OF_STEP,
    ASKING,
    RULES,
    Ask,
    NextAction,
    Pending,
    Rule,
    left_behind,
    may_reorder,
    next_action,
    next_state,
    parents_to_check,
    to_ask,
)

PROBLEM_CHARS_MAX = 1_024


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """An operation with the facts that its driver needs."""

    operation_id: int
    subject_id: int
    subject: Subject
    order_strategy: OrderStrategy
    """Order strategy of the children, which is not the subject's while this operation
    changes it.
    """
    partitions_wanted: int
    """Number of partitions with which the subject was created."""
    retention: Retention
    """Retention of the children, as for `order_strategy`."""
    static: bool
    """True if the subject is static: children continue the logic offsets of their parents, or begin
    above a loss.
    """
    state: OperationState
    pending: tuple[Pending, ...]
    """Every unfinished step; in OPEN also the children whose brokers do not know every consumer
    group.
    """
    todo: tuple[Partition, ...]
    """Partitions whose brokers have something to do in this state; their address is None if the
    broker is silent.
    """
    sources: tuple[Partition, ...] = ()
    """Parents whose brokers are asked, before any parent is sealed, whether they can seal them."""
    opening: tuple[Partition, ...] = ()
    """The hosted children while the parents are being sealed, without those of a hidden subject,
    which have messages already.
    """
    openings: Mapping[int, str] = field(default_factory=dict)
    """Partition id in `todo` → opening of the data folder whose broker is asked."""
    groups: tuple[tuple[int, str], ...] = ()
    """(id, name) of every consumer group of the subject; the children's brokers have to
    store them.
    """
    tokens_above: int = 0
    """Token that no token of the subject's deleted groups exceeds."""
    changes_settings: bool = False
    """True if the subject gets the settings of this operation when the route changes."""
    message_bytes_max: int = MESSAGE_BYTES_MAX
    """Message size limit of the children, in bytes, as for `order_strategy`."""
    publishes: bool = False
    """True if the children are a hidden subject's, and have messages."""
    replaces: bool = False
    """True if older partitions expire when the route changes, and brokers drop them."""


_claimed = (
    sa.update(operations)
    .where(
        operations.c.operation_id == sa.bindparam("of_operation"),
        sa.or_(operations.c.driver == sa.bindparam("by"), operations.c.driven_until <= now_ms()),
        operations.c.state.in_(ASKING),
    )
    .values(driver=sa.bindparam("by"), driven_until=now_ms() + sa.bindparam("for_ms"))
)


def claim_operation(
    connection: Connection, operation_id: int, *, driver: str, lease_ms: int
) -> Operation | None:
    """Lease an operation to `driver` for `lease_ms`; returns None if it is done or leased to
    another driver.
    """
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
        subjects.c.tokens_above,
        subjects.c.message_bytes_max,
    )
    .join(subjects, subjects.c.subject_id == operations.c.subject_id)
    .where(operations.c.operation_id == sa.bindparam("of_operation"))
)


def read_operation(connection: Connection, operation_id: int) -> Operation:
    """Return an operation with its unfinished steps."""
    row = connection.execute(_operation, {"of_operation": operation_id}).one()
    state = OperationState(row.state)
    pending, known, opening = _pending(connection, row)
    asked = {step.partition_id for step in to_ask(state, pending)}
    checked = set(parents_to_check(state, pending))
    return Operation(
        operation_id=row.operation_id,
        subject_id=row.subject_id,
        subject=Subject(row.name),
        order_strategy=OrderStrategy(row.new_order_strategy or row.order_strategy),
        partitions_wanted=row.partitions_wanted,
        retention=Retention(row.new_retention or row.retention),
        static=row.static,
        state=state,
        pending=pending,
        todo=tuple(partition for partition in known if partition.partition_id in asked),
        sources=tuple(partition for partition in known if partition.partition_id in checked),
        opening=opening,
        openings=read_openings(connection, asked),
        groups=_named_groups(connection, row.subject_id),
        tokens_above=row.tokens_above,
        changes_settings=bool(
            row.new_order_strategy or row.new_retention or row.new_message_bytes_max
        ),
        message_bytes_max=row.new_message_bytes_max or row.message_bytes_max,
        publishes=row.kind == OperationKind.PUBLISH,
        replaces=row.replaces,
    )


_steps = sa.select(steps).where(steps.c.operation_id == sa.bindparam("of_operation"))


def _pending(
    connection: Connection, row: sa.Row[Any]
) -> tuple[tuple[Pending, ...], tuple[Partition, ...], tuple[Partition, ...]]:
    """Return the unfinished steps, their partitions, and `Operation.opening`; each ordered by
    partition id.
    """
    rows = connection.execute(_steps, {"of_operation": row.operation_id}).all()
    left = {step.partition_id: step for step in rows if not step.done}
    asks = {key: ASK_OF_STEP[StepAction(step.action)] for key, step in left.items()}
    if RULES[OperationState(row.state)].asks is Ask.ANNOUNCE:
        shown = StepAction.SEAL if _seals_hidden(row, rows) else StepAction.HOST
        children = {step.partition_id: step for step in rows if step.action == shown}
        for partition_id in unheard_children(connection, row.subject_id, list(children)):
            left[partition_id] = children[partition_id]
            asks[partition_id] = Ask.ANNOUNCE
    opens: set[int] = set()
    if row.state == OperationState.SEAL and row.kind != OperationKind.PUBLISH:
        opens = {step.partition_id for step in rows if step.action == StepAction.HOST}
    read = read_partitions(connection, HOSTED_BY_ID, ids=sorted(opens.union(left))) if left else ()
    known = tuple(partition for partition in read if partition.partition_id in left)
    opening = tuple(partition for partition in read if partition.partition_id in opens)
    reorders = _may_reorder(row)
    pending = tuple(
        Pending(
            ask=asks[partition.partition_id],
            partition_id=partition.partition_id,
            broker_group=partition.broker_group,
            alive=partition.address is not None,
            given_up=left[partition.partition_id].given_up,
            may_reorder=reorders,
        )
        for partition in known
    )
    return pending, known, opening


def _seals_hidden(row: sa.Row[Any], rows: Sequence[sa.Row[Any]]) -> bool:
    """Return whether a publication opens nothing, because the hidden partitions are parents of
    others already, and are sealed by it.
    """
    hosted = any(step.action == StepAction.HOST for step in rows)
    return row.kind == OperationKind.PUBLISH and not hosted


def _may_reorder(row: sa.Row[Any]) -> bool:
    """Return whether an operation may change the route before silent brokers have sealed its
    parents.
    """
    strategy = OrderStrategy(row.order_strategy)
    return bool(row.without_source) and may_reorder(strategy, static=row.static)


_named = (
    sa.select(groups.c.group_id, groups.c.name)
    .where(groups.c.subject_id == sa.bindparam("of_subject"), sa.not_(groups.c.deleting))
    .order_by(groups.c.group_id)
)


def _named_groups(connection: Connection, subject_id: int) -> tuple[tuple[int, str], ...]:
    rows = connection.execute(_named, {"of_subject": subject_id})
    return tuple((row.group_id, row.name) for row in rows)


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
    """Return the state of an operation, and lock it until the transaction ends; None if it is
    unknown.
    """
    here = {"of_operation": operation_id}
    subject_id = connection.execute(_subject_id, here).scalar_one_or_none()
    if subject_id is None:
        return None
    # The beginning of an operation uses the same order: the subject's row, then the operation's.
    connection.execute(_subject_locked, {"of_subject": subject_id}).one()
    return OperationState(connection.execute(_state_locked, here).scalar_one())


def cancel_operation(connection: Connection, operation_id: int) -> None:
    """
    Cancel an operation in PLAN; a repeat changes nothing.

    The children are never opened. Because brokers may host some of them already, their steps become
    seals.

    Raises:
        NotFoundError
        ConflictError: the operation is past PLAN.
    """
    known = 0 < operation_id <= MAX_I64
    state = _lock_operation(connection, operation_id) if known else None
    if state is None:
        raise NotFoundError(Reason.OPERATION_UNKNOWN, operation_id=operation_id)
    if state is OperationState.CANCELED:
        return
    if not RULES[state].may_cancel:
        raise ConflictError(Reason.OPERATION_FORWARD, operation_id=operation_id, state=state.value)
    mine = steps.c.operation_id == operation_id
    row = connection.execute(_operation, {"of_operation": operation_id}).one()
    every = connection.execute(_steps, {"of_operation": operation_id}).all()
    given_up = StepAction.SEAL if _seals_hidden(row, every) else StepAction.HOST
    children = sa.select(steps.c.partition_id).where(mine, steps.c.action == given_up)
    connection.execute(
        sa.update(partitions)
        .where(partitions.c.partition_id.in_(children))
        .values(state=RULES[OperationState.CANCELED].children)
    )
    if given_up is StepAction.HOST:
        connection.execute(sa.delete(steps).where(mine, steps.c.action == StepAction.SEAL))
    connection.execute(sa.update(steps).where(mine).values(action=StepAction.SEAL, done=False))
    canceled = {"state": OperationState.CANCELED, "problem": "", "running": None}
    free = {"driver": None, "driven_until": 0}
    connection.execute(_set_operation, {"of_operation": operation_id} | canceled | free)
    if row.replaces:  # its groups were granted nothing meanwhile
        connection.execute(_unannounced, {"of_subject": row.subject_id})


def finish_round(
    connection: Connection,
    operation_id: int,
    done: Mapping[int, int | None],
    problem: str = "",
    *,
    heard: Collection[int] = (),
    sealable: Collection[int] | None = None,
    openings: Mapping[int, str] | None = None,
) -> OperationState:
    """
    Store the steps that brokers have done, then enter states until the operation has to wait.

    A broker that has done its step in an earlier opening is asked again, because its data folder
    may be an older copy by now.

    After the last seal, producers that write to the parents wait only for this transaction, which
    also changes the route.

    Args:
        done: partition id → end offset of a sealed partition, None for a hosted one.
        problem: the reason why a broker has not done its step, or "".
        heard: ids of the consumer groups that the brokers of the hosted partitions have stored.
        sealable: the parents whose brokers have just confirmed that they can seal them; None: all
            parents.
        openings: partition id → opening of the data folder whose broker was asked; None: no folder
            was opened since.

    Returns:
        The present state of the operation; DONE if it was deleted with its subject.
    """
    if openings is not None:
        now = read_openings(connection, done, lock=True)
        done = {key: end for key, end in done.items() if now.get(key) == openings.get(key)}
    # A cancel locks in the same order: the operation's row, then the rows of its steps.
    if _lock_operation(connection, operation_id) is None:
        return OperationState.DONE
    _note_steps(connection, operation_id, done, heard)
    operation = read_operation(connection, operation_id)
    while (
        after := next_state(operation.state, operation.pending, sealable=sealable)
    ) is not operation.state:
        _enter_state(connection, operation, after)
        operation = read_operation(connection, operation_id)
        problem = ""
    if RULES[operation.state].asks is None:
        problem = ""  # another driver has finished the operation
    values = {"of_operation": operation_id, "problem": problem[:PROBLEM_CHARS_MAX]}
    connection.execute(_set_operation, values)
    return operation.state


def _note_steps(
    connection: Connection,
    operation_id: int,
    done: Mapping[int, int | None],
    heard: Collection[int],
) -> None:
    """Store the steps in `done`; the arguments are those of `finish_round`."""
    for partition_id, end_offset in sorted(done.items()):
        if end_offset is not None:
            connection.execute(_sealed_at, {"of_partition": partition_id, "end": end_offset})
    hosted = [partition_id for partition_id, end_offset in done.items() if end_offset is None]
    store_heard(connection, {partition_id: list(heard) for partition_id in sorted(hosted)})
    # Steps are selected by action, because a cancel since then has changed the children's steps
    # from HOST to SEAL.
    for action in StepAction:
        ids = [key for key, end in done.items() if (end is None) is (action is StepAction.HOST)]
        which = {"of_operation": operation_id, "ids": ids, "what": action}
        connection.execute(_step_done, which)


_set_partitions = sa.update(partitions).where(partitions.c.partition_id.in_(sa.bindparam("ids")))
"""Sets the columns that are named in its parameters."""
_route_raised = (
    sa.update(subjects)
    .where(subjects.c.subject_id == sa.bindparam("of_subject"))
    .values(route_version=subjects.c.route_version + 1)
)
_set_subject = sa.update(subjects).where(subjects.c.subject_id == sa.bindparam("of_subject"))
"""Sets the columns that are named in its parameters."""
_unannounced = (
    sa.update(groups)
    .where(groups.c.subject_id == sa.bindparam("of_subject"))
    .values(told=False, settled=False, version=groups.c.version + 1)
)


def _enter_state(connection: Connection, operation: Operation, after: OperationState) -> None:
    before, rule = RULES[operation.state], RULES[after]
    if before.runs and not rule.runs:
        _change_route(connection, operation, rule)
    running = operation.subject_id if rule.runs else None
    values = {"of_operation": operation.operation_id, "state": after, "running": running}
    connection.execute(_set_operation, values)


def _change_route(connection: Connection, operation: Operation, rule: Rule) -> None:
    """Seal the parents and open the children in the subject's route."""
    rows = connection.execute(_steps, {"of_operation": operation.operation_id}).all()
    sealed = [row.partition_id for row in rows if row.action == StepAction.SEAL]
    children = [row.partition_id for row in rows if row.action == StepAction.HOST]
    connection.execute(_set_partitions, {"ids": sealed, "state": rule.parents})
    waiting = [step for step in operation.pending if step.ask is Ask.SEAL]
    lose_partitions(connection, [step.partition_id for step in waiting if step.given_up])
    # The end offset of an abandoned parent is unknown until its broker returns, even if the broker
    # reported one earlier.
    left = {"abandoned": True, "end_offset": None}
    connection.execute(_set_partitions, {"ids": left_behind(operation.pending), **left})
    connection.execute(_set_partitions, {"ids": children, "state": rule.children})
    # These children open although their silent brokers do not know every group; the brokers must
    # never serve them.
    unheard = [step.partition_id for step in operation.pending if step.ask is Ask.ANNOUNCE]
    refuse_folders(connection, unheard)
    if operation.static:
        set_logic_starts(connection, children)
    if operation.replaces:
        # With a cut all younger partitions stay, because they continue the hidden ones.
        younger = partitions.c.partition_id >= min(sealed)
        kept = partitions.c.partition_id.in_(children) if children else younger
        _expire_older(connection, operation.subject_id, kept)
        if operation.static and not children:
            shift_logic_offsets(connection, operation.subject_id, sealed)
    here = {"of_subject": operation.subject_id}
    connection.execute(_route_raised, here)
    if operation.changes_settings:
        settings = {
            "order_strategy": operation.order_strategy,
            "retention": operation.retention,
            "message_bytes_max": operation.message_bytes_max,
        }
        connection.execute(_set_subject, here | settings)
        # Brokers do not know the groups while retention is by time alone; the groups are announced
        # before a partition is granted.
        connection.execute(_unannounced, here)
    route_table(
        read_route(connection, operation.subject)
    )  # raises unless each logical partition has one open partition


def _expire_older(connection: Connection, subject_id: int, kept: sa.ColumnElement[bool]) -> None:
    """Expire every other partition of a subject, and journal that brokers drop them."""
    older = sa.and_(
        partitions.c.subject_id == subject_id,
        sa.not_(kept),
        partitions.c.state != PartitionState.EXPIRED,
    )
    plan_removals(connection, older)
    connection.execute(sa.update(partitions).where(older).values(state=PartitionState.EXPIRED))


def release_operation(
    connection: Connection, operation_id: int, *, driver: str, pause_ms: int = 0
) -> None:
    """End the driver's lease; any driver may claim the operation after `pause_ms`."""
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
        partitions.c.broker_group,
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
        UNFINISHED,
        operations.c.driven_until <= now_ms(),
    )
    .order_by(operations.c.driven_until, operations.c.operation_id)
)


def idle_operations(connection: Connection) -> list[int]:
    """
    Return the operations that have no driver and can continue, the longest waiting first.

    Announcements of new groups are not read here, so that every operation in OPEN counts as able to
    continue.
    """
    left: dict[int, list[sa.Row[Any]]] = {}
    for row in connection.execute(_left):
        left.setdefault(row.operation_id, []).append(row)
    return [operation_id for operation_id, rows in left.items() if _can_continue(rows)]


def _can_continue(rows: list[sa.Row[Any]]) -> bool:
    """Return whether an operation can continue; `rows` are its unfinished steps, or one row without
    a step.
    """
    pending = [
        Pending(
            ask=ASK_OF_STEP[StepAction(row.action)],
            partition_id=row.partition_id,
            broker_group=row.broker_group,
            alive=bool(row.alive),
            given_up=row.given_up,
            may_reorder=_may_reorder(row),
        )
        for row in rows
        if row.action is not None
    ]
    return next_action(OperationState(rows[0].state), pending) in {NextAction.ASK, NextAction.PASS}


def groups_of(connection: Connection, subject_id: int) -> list[int]:
    """Return the ids of a subject's consumer groups."""
    ids = sa.select(groups.c.group_id).where(groups.c.subject_id == subject_id)
    return list(connection.execute(ids).scalars())
