"""Writes a rebuilt cluster into an empty database. SQL, synchronous.

Invariants
    A database that has a subject is not changed.
    All rows are written in one transaction.
    No partition is granted before every old session has ended by its own clock, because its
    consumer may handle messages until then.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from ...protocol.errors import ConfigError
from ...protocol.operations import OperationKind, OperationState
from ...protocol.routing import PartitionState
from ...protocol.text import counted
from ..cluster.removals import plan_removals
from ..operations.states import RULES
from ..sql.dialect import insert_new, insert_or_replace, now_ms
from ..sql.duties import rebuilt_duty, take_duty
from ..sql.schema import (
    brokers,
    drained,
    given_up,
    groups,
    heard,
    leases,
    operations,
    partition_parents,
    partitions,
    steps,
    subjects,
)
from .rows import GonePartition, RebuiltCluster, RebuiltGroup, RebuiltOperation, RebuiltSubject


def store_rebuilt(connection: Connection, cluster: RebuiltCluster, *, route_version: int) -> None:
    """
    Write all rows of a rebuilt cluster; brokers count as silent until they report themselves.

    Args:
        route_version: the version of every route, above every version that clients know.

    Raises:
        ConfigError: the database is not empty.
    """
    check_empty(connection)
    kept = sa.select(brokers.c.broker_group).where(brokers.c.cordoned)
    cordoned = set(connection.execute(kept).scalars())
    unheard = {"readable": True, "writable": True, "seen_at": 0, "expires_at": 0}
    rows = [
        {
            "broker_group": source.hosted.broker_group,
            "broker_id": source.hosted.broker_id,
            "address": source.address,
            "cordoned": source.hosted.broker_group in cordoned,
            **unheard,
        }
        for source in cluster.sources
    ]
    insert_or_replace(connection, brokers, rows)
    # Operators see gone broker groups as silent and cordoned.
    gone = {lost.partition.broker_group for subject in cluster.subjects for lost in subject.gone}
    for name in sorted(gone):
        without_folder = {"broker_group": name, "broker_id": "", "address": "", "cordoned": True}
        insert_new(connection, brokers, without_folder | unheard)
    ids = {
        subject.name: _store_subject(connection, subject, route_version)
        for subject in cluster.subjects
    }
    _store_partitions(connection, cluster, ids)
    for subject in cluster.subjects:
        if subject.deleting:
            plan_removals(connection, partitions.c.subject_id == ids[subject.name])
        replaced = [row.partition.partition_id for row in subject.partitions if row.replaced]
        if replaced:
            plan_removals(connection, partitions.c.partition_id.in_(replaced))
        for group in subject.groups:
            _store_group(connection, ids[subject.name], group, subject.gone)
        # The running operation gets the highest id, because it is the subject's latest one.
        for operation in (subject.canceled, *subject.fences, subject.operation):
            if operation is not None:
                _store_operation(connection, ids[subject.name], operation)


def check_empty(connection: Connection) -> None:
    """Check that the database has no subject; it may have brokers. Raises ConfigError."""
    count = connection.execute(sa.select(sa.func.count()).select_from(subjects)).scalar_one()
    if count:
        raise ConfigError(
            f"the database is not empty: it has {counted(count, 'subject')}; nothing was changed"
        )


def _store_subject(connection: Connection, subject: RebuiltSubject, route_version: int) -> int:
    row = {
        "name": subject.name,
        "order_strategy": subject.order_strategy,
        "partitions_wanted": subject.partitions_wanted,
        "partitions_named": subject.partitions_named,
        "retention": subject.retention,
        "route_version": route_version if subject.opened else 0,
        "static": subject.static,
        "deleting": subject.deleting,
        "tokens_above": subject.tokens_above,
        "message_bytes_max": subject.message_bytes_max,
    }
    inserted = sa.insert(subjects).values(row).returning(subjects.c.subject_id)
    subject_id: int = connection.execute(inserted).scalar_one()
    return subject_id


def _store_partitions(connection: Connection, cluster: RebuiltCluster, ids: dict[str, int]) -> None:
    """Insert the partitions, first those that have ids, so that the database gives higher ids to
    all others.
    """
    numbered: list[dict[str, Any]] = []
    new: list[dict[str, Any]] = []
    lineage = []
    for subject in cluster.subjects:
        for row in subject.partitions:
            partition = row.partition
            values = {
                "subject_id": ids[subject.name],
                "name": partition.name,
                "queue": partition.queue,
                "range_start": partition.range_start,
                "range_end": partition.range_end,
                "broker_group": partition.broker_group,
                "state": partition.state,
                "end_offset": row.end_offset,
                "abandoned": row.abandoned,
                "lost": row.lost,
                "logic_start": partition.logic_start,
            }
            if partition.partition_id:
                numbered.append({"partition_id": partition.partition_id, **values})
            else:
                assert partition.state is PartitionState.PLANNED
                new.append(values)
            lineage += [
                {"partition_id": partition.partition_id, "parent_id": parent}
                for parent in partition.parents
            ]
    for rows in (sorted(numbered, key=lambda row: row["partition_id"]), new):
        if rows is new:
            highest = max([cluster.dropped_id, *(row["partition_id"] for row in numbered)])
            _number_above(connection, highest)
        if rows:
            connection.execute(sa.insert(partitions), rows)
    if lineage:
        connection.execute(sa.insert(partition_parents), lineage)


def _number_above(connection: Connection, highest: int) -> None:
    """Let the database give later partitions ids above `highest`, and above those of
    dropped ones.
    """
    if not highest:
        return
    if connection.dialect.name == "postgresql":
        sequence = sa.func.pg_get_serial_sequence("partitions", "partition_id")
        connection.execute(sa.select(sa.func.setval(sequence, highest)))
        return
    # SQLite keeps the highest id that it ever issued in a table of its own.
    given = sa.table("sqlite_sequence", sa.column("name"), sa.column("seq"))
    here = given.c.name == partitions.name
    if connection.execute(sa.select(given.c.seq).where(here)).one_or_none() is None:
        connection.execute(sa.insert(given).values(name=partitions.name, seq=highest))
    lower = sa.and_(here, given.c.seq < highest)
    connection.execute(sa.update(given).where(lower).values(seq=highest))


def _store_group(
    connection: Connection, subject_id: int, group: RebuiltGroup, gone: Sequence[GonePartition]
) -> None:
    row = {
        "subject_id": subject_id,
        "name": group.name,
        "strategy": group.strategy,
        "last_token": group.last_token,
        "version": 0,
        "settled": False,
        "route_version": 0,
    }
    group_id = connection.execute(
        sa.insert(groups).values(row).returning(groups.c.group_id)
    ).scalar_one()
    held = [
        {"group_id": group_id, "partition_id": key, "token": token, "withdrawn": False}
        for key, token in sorted(group.tokens.items())
    ]
    connection.execute(sa.insert(leases), held)
    take_duty(connection, rebuilt_duty(group_id), holder="rebuild", lease_ms=group.ttl_ms)
    on_disk = [{"group_id": group_id, "partition_id": key} for key in sorted(group.tokens)]
    connection.execute(sa.insert(heard), on_disk)
    through = [
        {"group_id": group_id, "partition_id": key, "parked": key in group.parked}
        for key in sorted(group.drained)
    ]
    if through:
        connection.execute(sa.insert(drained), through)
    lost = [
        {"group_id": group_id, "partition_id": each.partition.partition_id}
        for each in gone
        if group.name in each.unread_by
    ]
    if lost:
        connection.execute(sa.insert(given_up), lost)


def _store_operation(connection: Connection, subject_id: int, operation: RebuiltOperation) -> None:
    fencing = operation.state is OperationState.FENCE
    row = {
        "subject_id": subject_id,
        "kind": OperationKind.EVACUATE if fencing else OperationKind.RESIZE,
        "state": operation.state,
        "without_source": fencing,
        "problem": "",
        "running": subject_id if RULES[operation.state].runs else None,
        "driver": None,
        "driven_until": now_ms(),
    }
    operation_id = connection.execute(
        sa.insert(operations).values(row).returning(operations.c.operation_id)
    ).scalar_one()
    todo = [
        {"operation_id": operation_id, "partition_id": key, "action": action, "done": done}
        for key, (action, done) in sorted(operation.steps.items())
    ]
    connection.execute(sa.insert(steps), todo)
