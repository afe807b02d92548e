"""Plans hidden subjects: partitions that will continue the open ones of a target, if there is one.
SQL, synchronous.

Invariants
    Brokers host the partitions under the name of the target and with their parents, so that
    publishing changes nothing at brokers.
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
from ..cluster.brokers import lock_brokers, no_host, writable_groups
from ..cluster.lost_database import check_not_lost
from ..cluster.removals import being_deleted
from ..cluster.rows import SubjectRow
from ..cluster.subjects import check_subject_room, find_subject
from ..operations.plan_inputs import free_subject, open_partitions
from ..sql.dialect import now_ms
from ..sql.schema import partition_parents, partitions, publications, subjects


def plan_hidden(
    connection: Connection,
    target: str,
    ask: HideSubject,
    *,
    subjects_max: int,
    limited: bool = False,
) -> SubjectRow:
    """
    Store a hidden subject and its PLANNED partitions; changes nothing if it exists.

    Raises:
        InvalidRequestError, SubjectDeletedError, ConflictError,
            UnavailableError, OverloadedError
        SubjectUnknownError: there is no target, and `ask` gives no number of partitions for it.
        PublishError: the hidden subject's name is taken or was published.
        PublishError: another job fills it.
        ConflictError: the target itself is hidden.
        BusyError: the target's partitions are being changed.
    """
    check_name("subject", target)
    check_name("subject", ask.hidden)
    if ask.hidden == target:
        raise InvalidRequestError("a hidden subject needs another name than its target")
    check_not_lost(connection)
    lock_brokers(connection)
    _check_unpublished(connection, ask.hidden, target)
    known = find_subject(connection, ask.hidden)
    if known is not None:
        return _check_same(connection, known, target, ask)
    row = find_subject(connection, target)
    if row is None and not ask.partitions:
        raise SubjectUnknownError(
            f"there is no subject {target!r}: create it, or give the number of its partitions",
            subject=target,
        )
    hosts = Counter(writable_groups(connection))
    if not hosts:
        raise no_host(connection)
    for name in (ask.hidden,) if row is not None else (ask.hidden, target):
        check_subject_room(connection, name, subjects_max=subjects_max, limited=limited)
    if row is None:
        _insert_new(connection, target, ask, hosts)
    else:
        _insert_beside(connection, free_subject(connection, target), ask, hosts)
    made = find_subject(connection, ask.hidden)
    assert made is not None
    return made


def _check_unpublished(connection: Connection, hidden: str, target: str) -> None:
    published = sa.select(publications.c.target, publications.c.subject_id)
    there = connection.execute(published.where(publications.c.hidden == hidden)).one_or_none()
    if there is not None:
        raise PublishError(
            Reason.PUBLISH_TARGET,
            f"{hidden!r} was published in {there.target!r} before; choose another name",
            subject=hidden,
            target=target,
            published_id=there.subject_id,
        )


def _check_same(
    connection: Connection, known: SubjectRow, target: str, ask: HideSubject
) -> SubjectRow:
    if known.deleting:
        raise being_deleted(connection, known.subject_id, known.name)
    if known.hidden_for != target:
        what = f"made for {known.hidden_for!r}" if known.hidden_for else "not hidden"
        raise PublishError(
            Reason.PUBLISH_TARGET,
            f"subject {known.name!r} exists and is {what}",
            subject=known.name,
            target=target,
        )
    if ask.filled_by and known.filled_by not in {"", ask.filled_by}:
        raise PublishError(
            Reason.HIDDEN_TAKEN,
            f"{known.name!r} is filled by {known.filled_by}",
            subject=known.name,
            filled_by=known.filled_by,
        )
    here = subjects.c.subject_id == known.subject_id
    filler = known.filled_by or ask.filled_by
    connection.execute(
        sa.update(subjects).where(here).values(hidden_since=now_ms(), filled_by=filler)
    )
    return known


def _insert_new(connection: Connection, target: str, ask: HideSubject, hosts: Counter[Any]) -> None:
    """Insert a hidden subject whose target does not exist, whose name it takes when it is
    published.
    """
    subject_id = _insert_subject(
        connection,
        name=ask.hidden,
        filled_by=ask.filled_by,
        hidden_for=target,
        hidden_since=now_ms(),
        order_strategy=OrderStrategy.STRICT,
        partitions_wanted=ask.partitions,
        partitions_named=ask.partitions,
        retention=Retention.ACKED,
        static=ask.static,
        message_bytes_max=ask.message_bytes_max,
    )
    for number, bounds in enumerate(split_ranges(ask.partitions)):
        _insert_partition(
            connection, subject_id, partition_name(target, number), number, bounds, _next(hosts)
        )


def _insert_beside(
    connection: Connection, row: SubjectRow, ask: HideSubject, hosts: Counter[Any]
) -> None:
    """Insert a hidden subject with one child for each open partition of its target."""
    subject_id = _insert_subject(
        connection,
        name=ask.hidden,
        filled_by=ask.filled_by,
        hidden_for=row.name,
        hidden_since=now_ms(),
        order_strategy=row.order_strategy,
        partitions_wanted=row.partitions_wanted,
        partitions_named=row.partitions_wanted + row.partitions_named,
        retention=row.retention,
        static=row.static,
        message_bytes_max=row.message_bytes_max,
    )
    opened = open_partitions(connection, row)
    for number, parent in enumerate(opened, row.partitions_named):
        here = parent.broker_group if parent.broker_group in hosts else _next(hosts)
        child = _insert_partition(
            connection,
            subject_id,
            partition_name(row.name, number),
            parent.queue if row.static else number,
            (parent.range_start, parent.range_end),
            here,
        )
        line = {"partition_id": child, "parent_id": parent.partition_id}
        connection.execute(sa.insert(partition_parents), line)
    named = row.partitions_named + len(opened)
    here_row = subjects.c.subject_id == row.subject_id
    connection.execute(sa.update(subjects).where(here_row).values(partitions_named=named))


def _next(hosts: Counter[Any]) -> str:
    """Return the broker group with the fewest partitions, and count one more for it."""
    group: str = min(hosts, key=lambda host: (hosts[host], host))
    hosts[group] += 1
    return group


def _insert_subject(connection: Connection, **values: Any) -> int:
    row = sa.insert(subjects).values(route_version=0, **values).returning(subjects.c.subject_id)
    subject_id: int = connection.execute(row).scalar_one()
    return subject_id


def _insert_partition(
    connection: Connection,
    subject_id: int,
    name: str,
    queue: int,
    bounds: tuple[int, int],
    broker_group: str,
) -> int:
    row = sa.insert(partitions).values(
        subject_id=subject_id,
        name=name,
        queue=queue,
        range_start=bounds[0],
        range_end=bounds[1],
        broker_group=broker_group,
        state=PartitionState.PLANNED,
    )
    partition_id: int = connection.execute(row.returning(partitions.c.partition_id)).scalar_one()
    return partition_id
