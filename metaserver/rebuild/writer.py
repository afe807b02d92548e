"""Writes a rebuilt cluster into an empty database. Runs SQL synchronously.

Invariants
    A database that has a subject is not changed.
    All rows are written in one transaction.
    No partition is granted before all earlier sessions have expired by their own clocks, because
    their consumers may still handle messages until then.
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
from ..sql.cluster_facts import CLUSTER_ID
from ..sql.dialect import insert_new, insert_or_replace, now_ms, skip_ids
from ..sql.duties import rebuilt_duty, take_duty
from ..sql.schema import (
    brokers,
    drained,
    facts,
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
    Write all rows of a rebuilt cluster. Brokers count as silent until their next reports.

    Args:
        route_version: the version of every route, which must be higher than every version that
            clients know.

    Raises:
        ConfigError: the database is not empty.
    """
    check_empty(connection)
    if cluster.cluster_id:
        insert_or_replace(connection, facts, {"name": CLUSTER_ID, "value": cluster.cluster_id})
    query = sa.select(brokers.c.broker_group).where(brokers.c.cordoned)
    cordoned_groups = set(connection.execute(query).scalars())
    silent_columns = {"readable": True, "writable": True, "seen_at": 0, "expires_at": 0}
    rows = [
        {
            "broker_group": source.hosted.broker_group,
            "broker_id": source.hosted.broker_id,
            "address": source.address,
            "cordoned": source.hosted.broker_group in cordoned_groups,
            **silent_columns,
        }
        for source in cluster.sources
    ]
    insert_or_replace(connection, brokers, rows)
    # Operators see gone broker groups as silent and cordoned.
    gone_groups = {
        gone_partition.partition.broker_group
        for subject in cluster.subjects
        for gone_partition in subject.gone
    }
    for name in sorted(gone_groups):
        gone_broker = {"broker_group": name, "broker_id": "", "address": "", "cordoned": True}
        insert_new(connection, brokers, gone_broker | silent_columns)
    ids = {
        subject.name: _store_subject(connection, subject, route_version)
        for subject in cluster.subjects
    }
    _store_partitions(connection, cluster, ids)
    for subject in cluster.subjects:
        if subject.deleting:
            plan_removals(connection, partitions.c.subject_id == ids[subject.name])
        replaced_ids = [row.partition.partition_id for row in subject.partitions if row.replaced]
        if replaced_ids:
            plan_removals(connection, partitions.c.partition_id.in_(replaced_ids))
        for group in subject.groups:
            _store_group(connection, ids[subject.name], group, subject.gone)
        # The running operation gets the highest id, because it is the latest one of the subject.
        for operation in (subject.canceled_operation, *subject.fences, subject.operation):
            if operation is not None:
                _store_operation(connection, ids[subject.name], operation)


def check_empty(connection: Connection) -> None:
    """Check that the database has no subjects; it may have brokers. Raises ConfigError."""
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
    statement = sa.insert(subjects).values(row).returning(subjects.c.subject_id)
    subject_id: int = connection.execute(statement).scalar_one()
    return subject_id


def _store_partitions(connection: Connection, cluster: RebuiltCluster, ids: dict[str, int]) -> None:
    """Insert the partitions. Those that already have ids come first, so that the database assigns
    higher ids to the others.
    """
    numbered_rows: list[dict[str, Any]] = []
    unnumbered_rows: list[dict[str, Any]] = []
    lineage_rows = []
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
                numbered_rows.append({"partition_id": partition.partition_id, **values})
            else:
                assert partition.state is PartitionState.PLANNED
                unnumbered_rows.append(values)
            lineage_rows += [
                {"partition_id": partition.partition_id, "parent_id": parent}
                for parent in partition.parents
            ]
    for rows in (sorted(numbered_rows, key=lambda row: row["partition_id"]), unnumbered_rows):
        if rows is unnumbered_rows:
            highest_id = max([cluster.dropped_id, *(row["partition_id"] for row in numbered_rows)])
            if highest_id:
                skip_ids(connection, partitions, highest_id)
        if rows:
            connection.execute(sa.insert(partitions), rows)
    if lineage_rows:
        connection.execute(sa.insert(partition_parents), lineage_rows)


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
    lease_rows = [
        {"group_id": group_id, "partition_id": partition_id, "token": token, "withdrawn": False}
        for partition_id, token in sorted(group.tokens.items())
    ]
    connection.execute(sa.insert(leases), lease_rows)
    take_duty(connection, rebuilt_duty(group_id), holder="rebuild", lease_ms=group.ttl_ms)
    heard_rows = [
        {"group_id": group_id, "partition_id": partition_id}
        for partition_id in sorted(group.tokens)
    ]
    connection.execute(sa.insert(heard), heard_rows)
    drained_rows = [
        {
            "group_id": group_id,
            "partition_id": partition_id,
            "parked": partition_id in group.parked_ids,
        }
        for partition_id in sorted(group.drained_ids)
    ]
    if drained_rows:
        connection.execute(sa.insert(drained), drained_rows)
    given_up_rows = [
        {"group_id": group_id, "partition_id": each.partition.partition_id}
        for each in gone
        if group.name in each.unread_by
    ]
    if given_up_rows:
        connection.execute(sa.insert(given_up), given_up_rows)


def _store_operation(connection: Connection, subject_id: int, operation: RebuiltOperation) -> None:
    is_fence = operation.state is OperationState.FENCE
    row = {
        "subject_id": subject_id,
        "kind": OperationKind.EVACUATE if is_fence else OperationKind.RESIZE,
        "state": operation.state,
        "without_source": is_fence,
        "problem": "",
        "running": subject_id if RULES[operation.state].runs else None,
        "driver": None,
        "driven_until": now_ms(),
    }
    operation_id = connection.execute(
        sa.insert(operations).values(row).returning(operations.c.operation_id)
    ).scalar_one()
    step_rows = [
        {"operation_id": operation_id, "partition_id": partition_id, "action": action, "done": done}
        for partition_id, (action, done) in sorted(operation.steps.items())
    ]
    connection.execute(sa.insert(steps), step_rows)
