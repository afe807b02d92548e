"""Cuts seal and continue the partitions of a target, so that a hidden subject can replace all
earlier ones.

    P open, H hidden, child of P ─▶ cut: P sealed, C open, child of P and H ─▶ H filled from P
      ─▶ published: P expired, H sealed, C open

Runs SQL synchronously.

Invariants
    Brokers host a partition of a cut with both parents, so that publishing the hidden subject
    changes nothing at the brokers.
    Until a hidden subject is published, readers do not see its partitions as parents; see
    `IS_VISIBLE_PARENT`.
    The end offsets of the partitions before a cut never change. The transaction that begins the
    publication compares them, so no message can arrive in between.
    If two hidden subjects have cuts and the one with the later cut is published first, the other
    can never be published.

This module also finds the parents of a hidden subject's partitions and checks that they are the
open partitions of its target.
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
from ..cluster.brokers import lock_brokers, no_host_error, writable_groups
from ..cluster.rows import SubjectRow
from ..cluster.subjects import check_not_hidden, check_open, find_subject
from ..operations.begin import journal_operation
from ..operations.plan import plan_settings_change
from ..operations.plan_inputs import PlannedOperation, open_partitions, running_operation
from ..sql.schema import operations, partition_parents, partitions, steps


def read_parents(connection: Connection, row: SubjectRow) -> dict[int, set[int]]:
    """Return a dict that maps each open partition of a hidden subject to the ids of its parents."""
    ids = [partition.partition_id for partition in open_partitions(connection, row)]
    parents: dict[int, set[int]] = {partition_id: set() for partition_id in ids}
    links_query = sa.select(partition_parents).where(partition_parents.c.partition_id.in_(ids))
    for link in connection.execute(links_query):
        parents[link.partition_id].add(link.parent_id)
    return parents


def check_continues_target(
    connection: Connection, row: SubjectRow, target: SubjectRow, parents: Mapping[int, set[int]]
) -> None:
    """
    Check that a hidden subject continues the currently open partitions of its target.

    Raises:
        ConflictError, BusyError
        PublishError: the target's partitions have changed.
    """
    check_not_hidden(target)
    running_id = running_operation(connection, target.subject_id)
    if running_id is not None:
        raise BusyError(Reason.OPERATION_RUNNING, subject=target.name, operation_id=running_id)
    open_ids = {partition.partition_id for partition in open_partitions(connection, target)}
    if open_ids != set().union(*parents.values()):
        raise outdated_error(
            row,
            "its partitions were resized, moved or set"
            if any(parents.values())
            else "a subject of this name was created",
        )


def outdated_error(row: SubjectRow, cause: str) -> PublishError:
    """Build the error for a hidden subject whose parents are no longer the open partitions of its
    target. `cause` is what has happened since it was created.
    """
    return PublishError(
        Reason.PUBLISH_OUTDATED,
        f"{row.name!r} cannot be published in {row.hidden_for!r}: {cause} since it was made",
        subject=row.name,
        target=row.hidden_for,
    )


@dataclass(frozen=True, slots=True)
class Cut:
    """The operation whose new partitions continue both the target and a hidden subject."""

    operation_id: int
    state: OperationState


def begin_cut(
    connection: Connection, hidden_subject: str, target: str, *, driver: str, lease_ms: int
) -> int:
    """
    Begin the operation whose new partitions continue those of the target and of a hidden subject.
    Repeating the call has no effect.

    Returns:
        The operation id; 0 if there is no target and therefore nothing to cut.

    Raises:
        SubjectUnknownError: the hidden subject does not exist, or its creation is not finished.
        PublishError: the target's partitions have changed since the hidden subject was created.
        BusyError, UnavailableError
    """
    lock_brokers(connection)
    rows = {
        name: find_subject(connection, name, lock=True) for name in sorted({hidden_subject, target})
    }
    row, target_row = rows[hidden_subject], rows[target]
    if row is None or row.deleting or not row.route_version or row.hidden_for != target:
        raise SubjectUnknownError(
            f"{hidden_subject!r} is not a hidden subject that was made for {target!r}",
            subject=hidden_subject,
        )
    parents = read_parents(connection, row)
    if target_row is None and not any(parents.values()):
        return 0
    target_row = check_open(connection, target, target_row)
    existing_cut = find_cut(connection, list(parents))
    if existing_cut is not None:
        return existing_cut.operation_id
    check_continues_target(connection, row, target_row, parents)
    child_of_parent = {parent: hidden_id for hidden_id, ids in parents.items() for parent in ids}
    hosts = writable_groups(connection)
    if not hosts:
        raise no_host_error(connection)
    plan = plan_settings_change(open_partitions(connection, target_row), hosts)
    children = tuple(
        replace(
            child,
            parents=(
                *child.parents,
                *(PartitionId(child_of_parent[parent]) for parent in child.parents),
            ),
        )
        for child in plan.children
    )
    planned = PlannedOperation(subject=target_row, plan=replace(plan, children=children))
    request = Reshape(kind=OperationKind.CUT, subject=target)
    return journal_operation(connection, request, planned, driver=driver, lease_ms=lease_ms)


def find_cut(connection: Connection, hidden_ids: Collection[int]) -> Cut | None:
    """Return the cut whose partitions continue these partitions of a hidden subject. Return None if
    there is none, or if it was canceled.
    """
    query = (
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
    row = connection.execute(query).one_or_none()
    return None if row is None else Cut(row.operation_id, OperationState(row.state))


def _is_replaced(connection: Connection, cut: Cut) -> bool:
    """
    Return True if a publication has replaced the partitions before a cut.

    This is proved by a child of the cut that has expired but is not lost: retention expires a
    partition only after all of its parents, and therefore never one that continues a hidden
    partition.
    """
    query = (
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
    return connection.execute(query).one_or_none() is not None


def check_cut(
    connection: Connection,
    row: SubjectRow,
    target: SubjectRow,
    request: PublishSubject,
    cut: Cut,
    parents: Mapping[int, Collection[int]],
) -> None:
    """
    Check that a hidden subject with a cut may replace the partitions before the cut.

    Raises:
        BusyError: the cut or another operation is not finished.
        PublishError: the request does not replace the target's messages, which was the purpose of
            the cut; another publication has replaced the partitions before the cut; or the hidden
            subject has no rows for some messages.
    """
    if not request.replace:
        raise PublishError(
            Reason.PUBLISH_TARGET,
            f"{row.name!r} was made to replace messages of {target.name!r}: publish it "
            f"with --replace",
            subject=row.name,
            target=target.name,
        )
    check_not_hidden(target)
    running_id = running_operation(connection, target.subject_id)
    if running_id is None and cut.state not in ROUTE_FINAL:
        running_id = cut.operation_id
    if running_id is not None:
        raise BusyError(Reason.OPERATION_RUNNING, subject=target.name, operation_id=running_id)
    if _is_replaced(connection, cut):
        raise outdated_error(
            row, "another publication replaced the messages from which its rows were made"
        )
    older_query = sa.select(partitions).where(
        partitions.c.subject_id == target.subject_id,
        partitions.c.partition_id < min(parents),
        partitions.c.state != PartitionState.EXPIRED,
    )
    for partition in connection.execute(older_query.order_by(partitions.c.partition_id)):
        expected_end = None if request.ends is None else request.ends.get(partition.partition_id, 0)
        if partition.end_offset is None:
            raise PublishError(
                Reason.PUBLISH_BEHIND,
                f"the end of partition {partition.partition_id} is not known: its broker was "
                "silent when the partition was continued, and has not sealed it yet",
                subject=target.name,
                partition_id=partition.partition_id,
            )
        if expected_end is not None and partition.end_offset > expected_end:
            raise PublishError(
                Reason.PUBLISH_BEHIND,
                f"{partition.end_offset - expected_end} messages of partition "
                f"{partition.partition_id}, from offset {expected_end} on, are not in "
                f"{row.name!r}; nothing was changed",
                subject=target.name,
                partition_id=partition.partition_id,
                from_offset=expected_end,
                messages=partition.end_offset - expected_end,
            )
