"""Keeps the journal of operations: claims operations, stores their steps, and advances their
states. Runs SQL synchronously.

Invariants
    An operation enters a state in the same transaction that stores the last step of the previous
    state; see `states.py`.
    The route changes in one transaction: parents SEALED, children OPEN, version + 1. A publication
    of a hidden subject with a cut has no children: its steps seal the hidden partitions, which are
    parents of open ones and become visible at that point.
    A child opens only after its broker has stored every consumer group of the subject, or after the
    loss of the broker's data folder has been accepted, so that the folder is refused.
    Every function is idempotent.
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
from ..cluster.announcements import store_announced, unannounced_children
from ..cluster.brokers import read_openings
from ..cluster.losses import mark_lost, refuse_folders
from ..cluster.partitions import HOSTED_BY_ID, read_partitions
from ..cluster.queues import set_logic_starts, shift_logic_offsets
from ..cluster.removals import plan_removals
from ..cluster.subjects import read_route
from ..cluster.unfinished import UNFINISHED
from ..sql.cluster_facts import cluster_id_query
from ..sql.dialect import calendar_ms, now_ms
from ..sql.schema import brokers, groups, operations, partitions, steps, subjects
from .states import (
    ACTION_OF_STEP,
    ACTIVE_STATES,
    RULES,
    BrokerAction,
    NextAction,
    PendingStep,
    Rule,
    may_reorder,
    next_action,
    next_state,
    parents_to_check,
    skipped_parents,
    steps_to_request,
)

PROBLEM_CHARS_MAX = 1_024


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """An operation with everything that its driver needs."""

    operation_id: int
    subject_id: int
    subject: Subject
    order_strategy: OrderStrategy
    """Order strategy of the children. It differs from the subject's if the operation changes it."""
    partitions_wanted: int
    """Number of partitions with which the subject was created."""
    retention: Retention
    """Retention of the children; see `order_strategy`."""
    static: bool
    """True if the subject is static, so that children continue the logic offsets of their parents,
    or start above a loss.
    """
    state: OperationState
    pending: tuple[PendingStep, ...]
    """All unfinished steps. In OPEN, this includes one for each child whose broker does not know
    every consumer group.
    """
    targets: tuple[Partition, ...]
    """Partitions whose brokers have work in this state. The address is None if the broker is
    silent.
    """
    sources: tuple[Partition, ...] = ()
    """Parents whose brokers must confirm that they can seal, before any parent is sealed."""
    children_to_open: tuple[Partition, ...] = ()
    """The hosted children while the parents are being sealed. It is empty for a hidden subject,
    whose partitions already have messages.
    """
    openings: Mapping[int, str] = field(default_factory=dict)
    """Maps the id of each partition in `targets` to the opening of its broker's data folder."""
    groups: tuple[tuple[int, str], ...] = ()
    """The (id, name) of every consumer group of the subject, all of which the children's brokers
    must store.
    """
    tokens_above: int = 0
    """Upper bound of the tokens of the subject's deleted groups."""
    changes_settings: bool = False
    """True if the operation changes the subject's settings together with the route."""
    message_bytes_max: int = MESSAGE_BYTES_MAX
    """Maximum message size of the children, in bytes; see `order_strategy`."""
    cluster_id: str = ""
    """The identity of the cluster, which brokers store with the children."""
    publishes: bool = False
    """True if the children belong to a hidden subject and already have messages."""
    replaces: bool = False
    """True if older partitions are expired and dropped when the route changes."""


_claim = (
    sa.update(operations)
    .where(
        operations.c.operation_id == sa.bindparam("of_operation"),
        sa.or_(operations.c.driver == sa.bindparam("by"), operations.c.driven_until <= now_ms()),
        operations.c.state.in_(ACTIVE_STATES),
    )
    .values(driver=sa.bindparam("by"), driven_until=now_ms() + sa.bindparam("for_ms"))
)


def claim_operation(
    connection: Connection, operation_id: int, *, driver: str, lease_ms: int
) -> Operation | None:
    """Lease an operation to `driver` for `lease_ms` and return it. Return None if it is done or
    leased to another driver.
    """
    parameters = {"of_operation": operation_id, "by": driver, "for_ms": lease_ms}
    if not connection.execute(_claim, parameters).rowcount:
        return None
    return read_operation(connection, operation_id)


_operation_query = (
    sa.select(
        operations,
        subjects.c.name,
        subjects.c.order_strategy,
        subjects.c.partitions_wanted,
        subjects.c.retention,
        subjects.c.static,
        subjects.c.tokens_above,
        subjects.c.message_bytes_max,
        sa.func.coalesce(cluster_id_query.scalar_subquery(), "").label("cluster_id"),
    )
    .join(subjects, subjects.c.subject_id == operations.c.subject_id)
    .where(operations.c.operation_id == sa.bindparam("of_operation"))
)


def read_operation(connection: Connection, operation_id: int) -> Operation:
    """Return an operation with its unfinished steps."""
    row = connection.execute(_operation_query, {"of_operation": operation_id}).one()
    state = OperationState(row.state)
    pending, partitions_of_steps, children_to_open = _read_pending(connection, row)
    requested_ids = {step.partition_id for step in steps_to_request(state, pending)}
    ids_to_check = set(parents_to_check(state, pending))
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
        targets=tuple(
            partition
            for partition in partitions_of_steps
            if partition.partition_id in requested_ids
        ),
        sources=tuple(
            partition for partition in partitions_of_steps if partition.partition_id in ids_to_check
        ),
        children_to_open=children_to_open,
        openings=read_openings(connection, requested_ids),
        groups=_read_groups(connection, row.subject_id),
        tokens_above=row.tokens_above,
        changes_settings=bool(
            row.new_order_strategy or row.new_retention or row.new_message_bytes_max
        ),
        message_bytes_max=row.new_message_bytes_max or row.message_bytes_max,
        cluster_id=row.cluster_id,
        publishes=row.kind == OperationKind.PUBLISH,
        replaces=row.replaces,
    )


_steps_query = sa.select(steps).where(steps.c.operation_id == sa.bindparam("of_operation"))


def _read_pending(
    connection: Connection, row: sa.Row[Any]
) -> tuple[tuple[PendingStep, ...], tuple[Partition, ...], tuple[Partition, ...]]:
    """Return `Operation.pending`, the partitions of these steps, and `Operation.children_to_open`,
    each ordered by partition id.
    """
    rows = connection.execute(_steps_query, {"of_operation": row.operation_id}).all()
    unfinished_steps = {step.partition_id: step for step in rows if not step.done}
    actions = {
        key: ACTION_OF_STEP[StepAction(step.action)] for key, step in unfinished_steps.items()
    }
    if RULES[OperationState(row.state)].action is BrokerAction.ANNOUNCE:
        announced_action = StepAction.SEAL if _seals_hidden(row, rows) else StepAction.HOST
        children = {step.partition_id: step for step in rows if step.action == announced_action}
        for partition_id in unannounced_children(connection, row.subject_id, list(children)):
            unfinished_steps[partition_id] = children[partition_id]
            actions[partition_id] = BrokerAction.ANNOUNCE
    open_ids: set[int] = set()
    if row.state == OperationState.SEAL and row.kind != OperationKind.PUBLISH:
        open_ids = {step.partition_id for step in rows if step.action == StepAction.HOST}
    loaded_partitions = (
        read_partitions(connection, HOSTED_BY_ID, ids=sorted(open_ids.union(unfinished_steps)))
        if unfinished_steps
        else ()
    )
    pending_partitions = tuple(
        partition for partition in loaded_partitions if partition.partition_id in unfinished_steps
    )
    opening_children = tuple(
        partition for partition in loaded_partitions if partition.partition_id in open_ids
    )
    is_reordering = _may_reorder(row)
    pending = tuple(
        PendingStep(
            action=actions[partition.partition_id],
            partition_id=partition.partition_id,
            broker_group=partition.broker_group,
            alive=partition.address is not None,
            given_up=unfinished_steps[partition.partition_id].given_up,
            may_reorder=is_reordering,
        )
        for partition in pending_partitions
    )
    return pending, pending_partitions, opening_children


def _seals_hidden(row: sa.Row[Any], step_rows: Sequence[sa.Row[Any]]) -> bool:
    """Return True if a publication seals the hidden partitions instead of opening them, because
    they already are parents of other partitions.
    """
    hosted = any(step.action == StepAction.HOST for step in step_rows)
    return row.kind == OperationKind.PUBLISH and not hosted


def _may_reorder(row: sa.Row[Any]) -> bool:
    """Return True if the route may change before silent brokers have sealed the parents."""
    strategy = OrderStrategy(row.order_strategy)
    return bool(row.without_source) and may_reorder(strategy, static=row.static)


_groups_query = (
    sa.select(groups.c.group_id, groups.c.name)
    .where(groups.c.subject_id == sa.bindparam("of_subject"), sa.not_(groups.c.deleting))
    .order_by(groups.c.group_id)
)


def _read_groups(connection: Connection, subject_id: int) -> tuple[tuple[int, str], ...]:
    rows = connection.execute(_groups_query, {"of_subject": subject_id})
    return tuple((row.group_id, row.name) for row in rows)


_set_end_offset = (
    sa.update(partitions)
    .where(partitions.c.partition_id == sa.bindparam("of_partition"))
    .values(end_offset=sa.bindparam("end"))
)
_finish_steps = (
    sa.update(steps)
    .where(
        steps.c.operation_id == sa.bindparam("of_operation"),
        steps.c.partition_id.in_(sa.bindparam("ids")),
        steps.c.action == sa.bindparam("what"),
    )
    .values(done=True)
)
_update_operation = sa.update(operations).where(
    operations.c.operation_id == sa.bindparam("of_operation")
)
"""Updates the columns named by its parameters."""
_note_wait = _update_operation.values(
    problem=sa.bindparam("why"),
    waiting_since=sa.func.coalesce(operations.c.waiting_since, calendar_ms()),
)


_subject_id_query = sa.select(operations.c.subject_id).where(
    operations.c.operation_id == sa.bindparam("of_operation")
)
_lock_subject_query = (
    sa.select(subjects.c.subject_id)
    .where(subjects.c.subject_id == sa.bindparam("of_subject"))
    .with_for_update()
)
_lock_state_query = (
    sa.select(operations.c.state)
    .where(operations.c.operation_id == sa.bindparam("of_operation"))
    .with_for_update()
)


def _lock_operation(connection: Connection, operation_id: int) -> OperationState | None:
    """Lock an operation until the transaction ends and return its state; None if it is unknown."""
    parameters = {"of_operation": operation_id}
    subject_id = connection.execute(_subject_id_query, parameters).scalar_one_or_none()
    if subject_id is None:
        return None
    # Beginning an operation locks in the same order: the subject's row, then the operation's.
    connection.execute(_lock_subject_query, {"of_subject": subject_id}).one()
    return OperationState(connection.execute(_lock_state_query, parameters).scalar_one())


def cancel_operation(connection: Connection, operation_id: int) -> None:
    """
    Cancel an operation in PLAN. Idempotent.

    The children are never opened. Because brokers may already host some of them, their steps are
    changed to seals.

    Raises:
        NotFoundError
        ConflictError: the operation is past PLAN.
    """
    is_valid_id = 0 < operation_id <= MAX_I64
    state = _lock_operation(connection, operation_id) if is_valid_id else None
    if state is None:
        raise NotFoundError(Reason.OPERATION_UNKNOWN, operation_id=operation_id)
    if state is OperationState.CANCELED:
        return
    if not RULES[state].may_cancel:
        raise ConflictError(Reason.OPERATION_FORWARD, operation_id=operation_id, state=state.value)
    is_in_operation = steps.c.operation_id == operation_id
    row = connection.execute(_operation_query, {"of_operation": operation_id}).one()
    step_rows = connection.execute(_steps_query, {"of_operation": operation_id}).all()
    child_action = StepAction.SEAL if _seals_hidden(row, step_rows) else StepAction.HOST
    children = sa.select(steps.c.partition_id).where(
        is_in_operation, steps.c.action == child_action
    )
    connection.execute(
        sa.update(partitions)
        .where(partitions.c.partition_id.in_(children))
        .values(state=RULES[OperationState.CANCELED].child_state)
    )
    if child_action is StepAction.HOST:
        connection.execute(
            sa.delete(steps).where(is_in_operation, steps.c.action == StepAction.SEAL)
        )
    connection.execute(
        sa.update(steps).where(is_in_operation).values(action=StepAction.SEAL, done=False)
    )
    canceled_values = {
        "state": OperationState.CANCELED,
        "problem": "",
        "waiting_since": None,
        "running": None,
    }
    released_lease = {"driver": None, "driven_until": 0}
    connection.execute(
        _update_operation, {"of_operation": operation_id} | canceled_values | released_lease
    )
    if row.replaces:  # its groups had no grants while it ran
        connection.execute(_require_announcement, {"of_subject": row.subject_id})


def finish_round(
    connection: Connection,
    operation_id: int,
    end_offsets: Mapping[int, int | None],
    problem: str = "",
    *,
    group_ids: Collection[int] = (),
    sealable_ids: Collection[int] | None = None,
    openings: Mapping[int, str] | None = None,
) -> OperationState:
    """
    Store the steps that brokers have performed, then advance the operation as far as possible.

    A step that was performed during an earlier opening does not count, because the broker's data
    folder may have been replaced by an older copy since.

    After the last seal, producers writing to the parents only have to wait for this transaction,
    which also changes the route.

    Args:
        end_offsets: maps each partition id to the end offset of a sealed partition, or to None for
            a hosted one.
        problem: the reason why a broker has not performed its step, or "".
        group_ids: ids of the consumer groups that the brokers of the hosted partitions have stored.
        sealable_ids: ids of the parents whose brokers have just confirmed that they can seal; None
            means all parents.
        openings: maps each partition id to the opening of the data folder to which the request was
            sent; None skips this check.

    Returns:
        The current state of the operation; DONE if it was deleted with its subject.
    """
    if openings is not None:
        current_openings = read_openings(connection, end_offsets, lock=True)
        end_offsets = {
            partition_id: end
            for partition_id, end in end_offsets.items()
            if current_openings.get(partition_id) == openings.get(partition_id)
        }
    # `cancel_operation` locks in the same order: the operation's row, then its steps.
    if _lock_operation(connection, operation_id) is None:
        return OperationState.DONE
    _store_steps(connection, operation_id, end_offsets, group_ids)
    operation = read_operation(connection, operation_id)
    while (
        successor := next_state(operation.state, operation.pending, sealable_ids=sealable_ids)
    ) is not operation.state:
        _enter_state(connection, operation, successor)
        operation = read_operation(connection, operation_id)
        problem = ""
    if RULES[operation.state].action is None:
        problem = ""  # another driver has finished the operation
    if problem:
        values = {"of_operation": operation_id, "why": problem[:PROBLEM_CHARS_MAX]}
        connection.execute(_note_wait, values)
    else:
        values = {"of_operation": operation_id, "problem": "", "waiting_since": None}
        connection.execute(_update_operation, values)
    return operation.state


def _store_steps(
    connection: Connection,
    operation_id: int,
    end_offsets: Mapping[int, int | None],
    group_ids: Collection[int],
) -> None:
    """Store the steps in `end_offsets`; see `finish_round`."""
    for partition_id, end_offset in sorted(end_offsets.items()):
        if end_offset is not None:
            connection.execute(_set_end_offset, {"of_partition": partition_id, "end": end_offset})
    hosted_ids = [
        partition_id for partition_id, end_offset in end_offsets.items() if end_offset is None
    ]
    store_announced(
        connection, {partition_id: list(group_ids) for partition_id in sorted(hosted_ids)}
    )
    # Steps are selected by action, because a concurrent cancel may have changed the children's
    # steps from HOST to SEAL.
    for action in StepAction:
        ids = [
            partition_id
            for partition_id, end in end_offsets.items()
            if (end is None) is (action is StepAction.HOST)
        ]
        parameters = {"of_operation": operation_id, "ids": ids, "what": action}
        connection.execute(_finish_steps, parameters)


_update_partitions = sa.update(partitions).where(partitions.c.partition_id.in_(sa.bindparam("ids")))
"""Updates the columns named by its parameters."""
_open_partitions = _update_partitions.values(state=PartitionState.OPEN, opened_at=calendar_ms())
_raise_route_version = (
    sa.update(subjects)
    .where(subjects.c.subject_id == sa.bindparam("of_subject"))
    .values(route_version=subjects.c.route_version + 1)
)
_update_subject = sa.update(subjects).where(subjects.c.subject_id == sa.bindparam("of_subject"))
"""Updates the columns named by its parameters."""
_require_announcement = (
    sa.update(groups)
    .where(groups.c.subject_id == sa.bindparam("of_subject"))
    .values(told=False, settled=False, version=groups.c.version + 1)
)


def _enter_state(connection: Connection, operation: Operation, state: OperationState) -> None:
    """Store the new state of an operation, and change the route if the state requires it."""
    old_rule, rule = RULES[operation.state], RULES[state]
    if old_rule.runs and not rule.runs:
        _change_route(connection, operation, rule)
    running_subject_id = operation.subject_id if rule.runs else None
    values = {"of_operation": operation.operation_id, "state": state, "running": running_subject_id}
    connection.execute(_update_operation, values)


def _change_route(connection: Connection, operation: Operation, rule: Rule) -> None:
    """Change the subject's route: seal the parents and open the children."""
    rows = connection.execute(_steps_query, {"of_operation": operation.operation_id}).all()
    sealed_ids = [row.partition_id for row in rows if row.action == StepAction.SEAL]
    child_ids = [row.partition_id for row in rows if row.action == StepAction.HOST]
    connection.execute(_update_partitions, {"ids": sealed_ids, "state": rule.parent_state})
    unsealed_steps = [step for step in operation.pending if step.action is BrokerAction.SEAL]
    mark_lost(connection, [step.partition_id for step in unsealed_steps if step.given_up])
    # The end offset of an abandoned parent is unknown until its broker returns, even if one was
    # reported earlier.
    abandoned_values = {"abandoned": True, "end_offset": None}
    connection.execute(
        _update_partitions, {"ids": skipped_parents(operation.pending), **abandoned_values}
    )
    connection.execute(_open_partitions, {"ids": child_ids})
    # These children open although their silent brokers do not know every group, so the brokers must
    # never serve them.
    unannounced_ids = [
        step.partition_id for step in operation.pending if step.action is BrokerAction.ANNOUNCE
    ]
    refuse_folders(connection, unannounced_ids)
    if operation.static:
        set_logic_starts(connection, child_ids)
    if operation.replaces:
        # With a cut, all newer partitions stay, because they continue the hidden ones.
        is_newer = partitions.c.partition_id >= min(sealed_ids)
        is_kept = partitions.c.partition_id.in_(child_ids) if child_ids else is_newer
        _expire_older(connection, operation.subject_id, is_kept)
        if operation.static and not child_ids:
            shift_logic_offsets(connection, operation.subject_id, sealed_ids)
    parameters = {"of_subject": operation.subject_id}
    connection.execute(_raise_route_version, parameters)
    if operation.changes_settings:
        settings = {
            "order_strategy": operation.order_strategy,
            "retention": operation.retention,
            "message_bytes_max": operation.message_bytes_max,
        }
        connection.execute(_update_subject, parameters | settings)
        # With retention by time alone, brokers may not know the groups, which must be announced
        # before a partition is granted.
        connection.execute(_require_announcement, parameters)
    # Raises unless each logical partition has exactly one open partition.
    route_table(read_route(connection, operation.subject))


def _expire_older(connection: Connection, subject_id: int, is_kept: sa.ColumnElement[bool]) -> None:
    """Expire the partitions of a subject that are not kept, and journal their removal from the
    brokers.
    """
    is_expired = sa.and_(
        partitions.c.subject_id == subject_id,
        sa.not_(is_kept),
        partitions.c.state != PartitionState.EXPIRED,
    )
    plan_removals(connection, is_expired)
    connection.execute(sa.update(partitions).where(is_expired).values(state=PartitionState.EXPIRED))


def release_operation(
    connection: Connection, operation_id: int, *, driver: str, pause_ms: int = 0
) -> None:
    """End the driver's lease. Any driver may claim the operation `pause_ms` later."""
    is_driven = sa.and_(operations.c.operation_id == operation_id, operations.c.driver == driver)
    free_at_ms = now_ms() + pause_ms
    connection.execute(sa.update(operations).where(is_driven).values(driven_until=free_at_ms))


_idle_query = (
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
    Return the operations that have no driver and can continue, starting with those that have waited
    longest.

    Every operation in OPEN is included, because announcements of new groups are not taken into
    account.
    """
    by_operation: dict[int, list[sa.Row[Any]]] = {}
    for row in connection.execute(_idle_query):
        by_operation.setdefault(row.operation_id, []).append(row)
    return [operation_id for operation_id, rows in by_operation.items() if _can_continue(rows)]


def _can_continue(rows: list[sa.Row[Any]]) -> bool:
    """Return True if an operation can continue. `rows` are its unfinished steps, or a single row
    without a step.
    """
    pending = [
        PendingStep(
            action=ACTION_OF_STEP[StepAction(row.action)],
            partition_id=row.partition_id,
            broker_group=row.broker_group,
            alive=bool(row.alive),
            given_up=row.given_up,
            may_reorder=_may_reorder(row),
        )
        for row in rows
        if row.action is not None
    ]
    return next_action(OperationState(rows[0].state), pending) in {
        NextAction.REQUEST,
        NextAction.ADVANCE,
    }


def groups_of(connection: Connection, subject_id: int) -> list[int]:
    """Return the ids of a subject's consumer groups."""
    ids = sa.select(groups.c.group_id).where(groups.c.subject_id == subject_id)
    return list(connection.execute(ids).scalars())
