"""Plans hidden subjects, whose partitions will continue the open ones of an existing target. Runs
SQL synchronously.

Invariants
    Brokers host the partitions under the target's name and with their parents, so that publishing
    changes nothing at the brokers.
    A hidden subject has the ranges, queues and settings of its target.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from ...protocol.control import Retention
from ...protocol.errors import InvalidRequestError, PublishError, Reason, SubjectUnknownError
from ...protocol.ids import check_name, partition_name
from ...protocol.operations import HideSubject
from ...protocol.routing import OrderStrategy, PartitionState, split_ranges
from ..cluster.brokers import lock_brokers, no_host_error, writable_groups
from ..cluster.lost_database import check_database_complete
from ..cluster.removals import being_deleted_error
from ..cluster.rows import SubjectRow
from ..cluster.subjects import check_subject_limits, find_subject
from ..operations.plan_inputs import lock_idle_subject, open_partitions
from ..sql.dialect import now_ms
from ..sql.schema import partition_parents, partitions, publications, subjects


def plan_hidden(
    connection: Connection,
    target: str,
    request: HideSubject,
    *,
    subjects_max: int,
    limited: bool = False,
) -> SubjectRow:
    """
    Store a hidden subject and its PLANNED partitions, unless it already exists.

    Raises:
        InvalidRequestError, SubjectDeletedError, UnavailableError, OverloadedError
        SubjectUnknownError: there is no target, and `request` does not specify a number of
            partitions.
        PublishError: the hidden subject's name is taken or was published, or another job fills
            the subject.
        ConflictError: the target is hidden itself, or the request conflicts with it.
        BusyError: the target's partitions are being changed.
    """
    check_name("subject", target)
    check_name("subject", request.hidden)
    if request.hidden == target:
        raise InvalidRequestError("a hidden subject needs another name than its target")
    check_database_complete(connection)
    lock_brokers(connection)
    _check_unpublished(connection, request.hidden, target)
    existing_row = find_subject(connection, request.hidden)
    if existing_row is not None:
        return _renew_existing(connection, existing_row, target, request)
    target_row = find_subject(connection, target)
    if target_row is None and not request.partitions:
        raise SubjectUnknownError(
            f"there is no subject {target!r}: create it, or give the number of its partitions",
            subject=target,
        )
    hosts = Counter(writable_groups(connection))
    if not hosts:
        raise no_host_error(connection)
    for name in (request.hidden,) if target_row is not None else (request.hidden, target):
        check_subject_limits(connection, name, subjects_max=subjects_max, limited=limited)
    if target_row is None:
        _insert_new(connection, target, request, hosts)
    else:
        _insert_beside(connection, lock_idle_subject(connection, target), request, hosts)
    row = find_subject(connection, request.hidden)
    assert row is not None
    return row


def _check_unpublished(connection: Connection, hidden_subject: str, target: str) -> None:
    """Check that no hidden subject with this name has been published. Raises PublishError."""
    query = sa.select(publications.c.target, publications.c.subject_id)
    is_published = connection.execute(
        query.where(publications.c.hidden == hidden_subject)
    ).one_or_none()
    if is_published is not None:
        raise PublishError(
            Reason.PUBLISH_TARGET,
            f"{hidden_subject!r} was published in {is_published.target!r} before; choose another "
            "name",
            subject=hidden_subject,
            target=target,
            published_id=is_published.subject_id,
        )


def _renew_existing(
    connection: Connection, existing_row: SubjectRow, target: str, request: HideSubject
) -> SubjectRow:
    """
    Restart the idle time of an existing hidden subject, and return it.

    Raises:
        SubjectDeletedError: it is being deleted.
        PublishError: it is not the requested hidden subject, or another job fills it.
    """
    if existing_row.deleting:
        raise being_deleted_error(connection, existing_row.subject_id, existing_row.name)
    if existing_row.hidden_for != target:
        state_text = (
            f"made for {existing_row.hidden_for!r}" if existing_row.hidden_for else "not hidden"
        )
        raise PublishError(
            Reason.PUBLISH_TARGET,
            f"subject {existing_row.name!r} exists and is {state_text}",
            subject=existing_row.name,
            target=target,
        )
    if request.filled_by and existing_row.filled_by not in {"", request.filled_by}:
        raise PublishError(
            Reason.HIDDEN_TAKEN,
            f"{existing_row.name!r} is filled by {existing_row.filled_by}",
            subject=existing_row.name,
            filled_by=existing_row.filled_by,
        )
    this_subject = subjects.c.subject_id == existing_row.subject_id
    filled_by = existing_row.filled_by or request.filled_by
    connection.execute(
        sa.update(subjects).where(this_subject).values(hidden_since=now_ms(), filled_by=filled_by)
    )
    return existing_row


def _insert_new(
    connection: Connection, target: str, request: HideSubject, hosts: Counter[Any]
) -> None:
    """Insert a hidden subject whose target does not exist; publishing it will give it the target's
    name.
    """
    subject_id = _insert_subject(
        connection,
        name=request.hidden,
        filled_by=request.filled_by,
        hidden_for=target,
        hidden_since=now_ms(),
        order_strategy=OrderStrategy.STRICT,
        partitions_wanted=request.partitions,
        partitions_named=request.partitions,
        retention=Retention.ACKED,
        static=request.static,
        message_bytes_max=request.message_bytes_max,
    )
    for number, bounds in enumerate(split_ranges(request.partitions)):
        _insert_partition(
            connection,
            subject_id,
            partition_name(target, number),
            number,
            bounds,
            _choose_host(hosts),
        )


def _insert_beside(
    connection: Connection, target: SubjectRow, request: HideSubject, hosts: Counter[Any]
) -> None:
    """Insert a hidden subject with one child for each open partition of its target."""
    subject_id = _insert_subject(
        connection,
        name=request.hidden,
        filled_by=request.filled_by,
        hidden_for=target.name,
        hidden_since=now_ms(),
        order_strategy=target.order_strategy,
        partitions_wanted=target.partitions_wanted,
        partitions_named=target.partitions_wanted + target.partitions_named,
        retention=target.retention,
        static=target.static,
        message_bytes_max=target.message_bytes_max,
    )
    parents = open_partitions(connection, target)
    for number, parent in enumerate(parents, target.partitions_named):
        host = parent.broker_group if parent.broker_group in hosts else _choose_host(hosts)
        child_id = _insert_partition(
            connection,
            subject_id,
            partition_name(target.name, number),
            parent.queue if target.static else number,
            (parent.range_start, parent.range_end),
            host,
        )
        lineage_row = {"partition_id": child_id, "parent_id": parent.partition_id}
        connection.execute(sa.insert(partition_parents), lineage_row)
    partitions_named = target.partitions_named + len(parents)
    this_target = subjects.c.subject_id == target.subject_id
    connection.execute(
        sa.update(subjects).where(this_target).values(partitions_named=partitions_named)
    )


def _choose_host(hosts: Counter[Any]) -> str:
    """Return the broker group with the fewest partitions and increment its count."""
    group: str = min(hosts, key=lambda host: (hosts[host], host))
    hosts[group] += 1
    return group


def _insert_subject(connection: Connection, **values: Any) -> int:
    statement = (
        sa.insert(subjects).values(route_version=0, **values).returning(subjects.c.subject_id)
    )
    subject_id: int = connection.execute(statement).scalar_one()
    return subject_id


def _insert_partition(
    connection: Connection,
    subject_id: int,
    name: str,
    queue: int,
    bounds: tuple[int, int],
    broker_group: str,
) -> int:
    statement = sa.insert(partitions).values(
        subject_id=subject_id,
        name=name,
        queue=queue,
        range_start=bounds[0],
        range_end=bounds[1],
        broker_group=broker_group,
        state=PartitionState.PLANNED,
    )
    partition_id: int = connection.execute(
        statement.returning(partitions.c.partition_id)
    ).scalar_one()
    return partition_id
