"""Cuts: a target's partitions are sealed and continued, so that a hidden subject can replace all
earlier ones.

    P open, H hidden, child of P ─▶ cut: P sealed, C open, child of P and H ─▶ H filled from P
      ─▶ published: P expired, H sealed, C open

SQL, synchronous.

Invariants
    Brokers host a partition of a cut with both parents, so that publishing the hidden subject
    changes no fact at a broker.
    While a hidden subject is not published, readers do not see its partitions as parents:
    `SEEN_PARENT`.
    The partitions before a cut have their ends for ever. So ends are compared in the transaction
    that begins the publication, and no message can arrive in between.
    Of two hidden subjects with cuts, the one with the later cut may be published first; then the
    other one can never be published.

Finds the parents of a hidden subject's partitions, and checks that they are the open partitions of
its target.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from ...protocol.errors import BusyError, PublishError, Reason, SubjectUnknownError
from ...protocol.ids import PartitionId
from ...protocol.operations import (
    ROUTE_FINAL,
    OperationKind,
    OperationState,
    PublishSubject,
    Reshape,
    StepAction,
)
from ...protocol.routing import PartitionState
from ..cluster.brokers import lock_brokers, no_host, writable_groups
from ..cluster.rows import SubjectRow
from ..cluster.subjects import check_not_hidden, check_open, find_subject
from ..operations.begin import journal_operation
from ..operations.plan import plan_set
from ..operations.plan_inputs import PlannedOperation, open_partitions, running_operation
from ..sql.schema import operations, partition_parents, partitions, steps


def parents_of(connection: Connection, row: SubjectRow) -> dict[int, set[int]]:
    """Return partition id → its parents, for the open partitions of a hidden subject."""
    ids = [partition.partition_id for partition in open_partitions(connection, row)]
    parents: dict[int, set[int]] = {partition_id: set() for partition_id in ids}
    chosen = sa.select(partition_parents).where(partition_parents.c.partition_id.in_(ids))
    for line in connection.execute(chosen):
        parents[line.partition_id].add(line.parent_id)
    return parents


def check_continues(
    connection: Connection, row: SubjectRow, target: SubjectRow, parents: Mapping[int, set[int]]
) -> None:
    """
    Check that a hidden subject continues the present open partitions of its target.

    Raises:
        ConflictError, BusyError
        PublishError: the target's partitions have changed.
    """
    check_not_hidden(target)
    running = running_operation(connection, target.subject_id)
    if running is not None:
        raise BusyError(Reason.OPERATION_RUNNING, subject=target.name, operation_id=running)
    now = {partition.partition_id for partition in open_partitions(connection, target)}
    if now != set().union(*parents.values()):
        raise outdated(
            row,
            "its partitions were resized, moved or set"
            if any(parents.values())
            else "a subject of this name was created",
        )


def outdated(row: SubjectRow, what: str) -> PublishError:
    """Make the error for a hidden subject that continues other partitions than the open ones of its
    target.
    """
    return PublishError(
        Reason.PUBLISH_OUTDATED,
        f"{row.name!r} cannot be published in {row.hidden_for!r}: {what} since it was made",
        subject=row.name,
        target=row.hidden_for,
    )


@dataclass(frozen=True, slots=True)
class Cut:
    """The operation that makes new partitions continue both the target and a hidden subject."""

    operation_id: int
    state: OperationState


def begin_cut(
    connection: Connection, hidden: str, target: str, *, driver: str, lease_ms: int
) -> int:
    """
    Begin the operation whose new partitions continue both the target's and a hidden subject's; a
    repeat changes nothing.

    Returns:
        The id of the operation; 0 if there is no target, and therefore nothing to cut.

    Raises:
        SubjectUnknownError: the hidden subject is gone, or its creation is not finished.
        PublishError: the target's partitions have changed since the hidden subject was
            made.
        BusyError, UnavailableError
    """
    lock_brokers(connection)
    rows = {name: find_subject(connection, name, lock=True) for name in sorted({hidden, target})}
    row, there = rows[hidden], rows[target]
    if row is None or row.deleting or not row.route_version or row.hidden_for != target:
        raise SubjectUnknownError(
            f"{hidden!r} is not a hidden subject that was made for {target!r}", subject=hidden
        )
    parents = parents_of(connection, row)
    if there is None and not any(parents.values()):
        return 0
    there = check_open(connection, target, there)
    known = cut_of(connection, list(parents))
    if known is not None:
        return known.operation_id
    check_continues(connection, row, there, parents)
    behind = {parent: hidden_id for hidden_id, ids in parents.items() for parent in ids}
    hosts = writable_groups(connection)
    if not hosts:
        raise no_host(connection)
    plan = plan_set(open_partitions(connection, there), hosts)
    children = tuple(
        replace(
            child,
            parents=(*child.parents, *(PartitionId(behind[parent]) for parent in child.parents)),
        )
        for child in plan.children
    )
    planned = PlannedOperation(subject=there, plan=replace(plan, children=children))
    ask = Reshape(kind=OperationKind.CUT, subject=target)
    return journal_operation(connection, ask, planned, driver=driver, lease_ms=lease_ms)


def cut_of(connection: Connection, hidden_ids: Collection[int]) -> Cut | None:
    """Return the operation that made partitions continue these of a hidden subject; None if there
    is none or it was canceled.
    """
    chosen = (
        sa.select(operations.c.operation_id, operations.c.state)
        .join(steps, steps.c.operation_id == operations.c.operation_id)
        .join(partition_parents, partition_parents.c.partition_id == steps.c.partition_id)
        .where(
            operations.c.kind == OperationKind.CUT,
            operations.c.state != OperationState.CANCELED,
            steps.c.action == StepAction.HOST,
            partition_parents.c.parent_id.in_(hidden_ids),
        )
        .limit(1)
    )
    row = connection.execute(chosen).one_or_none()
    return None if row is None else Cut(row.operation_id, OperationState(row.state))


def _is_replaced(connection: Connection, cut: Cut) -> bool:
    """
    Return whether a publication has replaced the partitions before a cut.

    Retention expires a partition only after all its parents, and therefore never one that continues
    a hidden partition, so that an expired child of the cut means a publication.
    """
    chosen = (
        sa.select(partitions.c.partition_id)
        .join(steps, steps.c.partition_id == partitions.c.partition_id)
        .where(
            steps.c.operation_id == cut.operation_id,
            steps.c.action == StepAction.HOST,
            partitions.c.state == PartitionState.EXPIRED,
            sa.not_(partitions.c.lost),
        )
        .limit(1)
    )
    return connection.execute(chosen).one_or_none() is not None


def check_cut(
    connection: Connection,
    row: SubjectRow,
    target: SubjectRow,
    ask: PublishSubject,
    cut: Cut,
    parents: Mapping[int, Collection[int]],
) -> None:
    """
    Check that a hidden subject with a cut may replace the partitions before the cut.

    Raises:
        PublishError: the request does not replace the target's messages, but the cut was made
            for that.
        BusyError: the cut or another operation is not finished.
        PublishError: another publication has replaced the partitions before the cut.
        PublishError: there are messages from which it has no rows.
    """
    if not ask.replace:
        raise PublishError(
            Reason.PUBLISH_TARGET,
            f"{row.name!r} was made to replace messages of {target.name!r}: publish it "
            f"with --replace",
            subject=row.name,
            target=target.name,
        )
    check_not_hidden(target)
    running = running_operation(connection, target.subject_id)
    if running is None and cut.state not in ROUTE_FINAL:
        running = cut.operation_id
    if running is not None:
        raise BusyError(Reason.OPERATION_RUNNING, subject=target.name, operation_id=running)
    if _is_replaced(connection, cut):
        raise outdated(
            row, "another publication replaced the messages from which its rows were made"
        )
    older = sa.select(partitions).where(
        partitions.c.subject_id == target.subject_id,
        partitions.c.partition_id < min(parents),
        partitions.c.state != PartitionState.EXPIRED,
    )
    for each in connection.execute(older.order_by(partitions.c.partition_id)):
        expected = None if ask.ends is None else ask.ends.get(each.partition_id, 0)
        if each.end_offset is None:
            raise PublishError(
                Reason.PUBLISH_BEHIND,
                f"the end of partition {each.partition_id} is not known: its broker was silent "
                "when the partition was continued, and has not sealed it yet",
                subject=target.name,
                partition_id=each.partition_id,
            )
        if expected is not None and each.end_offset > expected:
            raise PublishError(
                Reason.PUBLISH_BEHIND,
                f"{each.end_offset - expected} messages of partition {each.partition_id}, from "
                f"offset {expected} on, are not in {row.name!r}; nothing was changed",
                subject=target.name,
                partition_id=each.partition_id,
                from_offset=expected,
                messages=each.end_offset - expected,
            )
