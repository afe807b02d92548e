"""Reads the database, asks every broker, reads the database again, and runs the checks. Does
network I/O and runs SQL.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Collection

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from ...protocol.errors import KeylaneError
from ...protocol.operations import OperationState, StepAction
from ...protocol.verification import Verification
from ...rpc.client import BrokerClient
from ...rpc.metaservers import CALL_TIMEOUT_MS
from ...rpc.network import Network
from ..cluster.partitions import PartitionFilter, read_partitions
from ..cluster.subjects import all_subjects
from ..operations.states import ADVANCING_STATES
from ..sql.database import Database
from ..sql.dialect import begin_snapshot, now_ms
from ..sql.schema import (
    brokers,
    drained,
    groups,
    heard,
    leases,
    operations,
    partitions,
    refused_brokers,
    steps,
)
from .checks import (
    BrokerAnswer,
    BrokerRow,
    GroupRow,
    OperationRow,
    PartitionView,
    SqlView,
    Views,
    verify,
)


def read_sql_view(connection: Connection) -> SqlView:
    """Read one snapshot of the database. Must be the first read of its transaction."""
    begin_snapshot(connection)
    return SqlView(
        subjects={subject.subject_id: subject for subject in all_subjects(connection)},
        partitions=_read_partitions(connection),
        groups=_read_groups(connection),
        operations=_read_operations(connection),
        brokers=_read_brokers(connection),
        refused=_read_refused(connection),
    )


def _read_partitions(connection: Connection) -> dict[int, PartitionView]:
    rows = {row.partition_id: row for row in connection.execute(sa.select(partitions))}
    return {
        partition.partition_id: PartitionView(
            subject_id=rows[partition.partition_id].subject_id,
            partition=partition,
            end_offset=rows[partition.partition_id].end_offset,
            abandoned=rows[partition.partition_id].abandoned,
        )
        for partition in read_partitions(connection, PartitionFilter(sa.true(), hosted=True))
    }


def _read_groups(connection: Connection) -> list[GroupRow]:
    tokens: dict[int, dict[int, int]] = defaultdict(dict)
    for row in connection.execute(sa.select(leases)):
        tokens[row.group_id][row.partition_id] = row.token
    drained_ids: dict[int, set[int]] = defaultdict(set)
    for row in connection.execute(sa.select(drained)):
        drained_ids[row.group_id].add(row.partition_id)
    announced_ids: dict[int, set[int]] = defaultdict(set)
    for row in connection.execute(sa.select(heard)):
        announced_ids[row.group_id].add(row.partition_id)
    return [
        GroupRow(
            group_id=row.group_id,
            subject_id=row.subject_id,
            name=row.name,
            last_token=row.last_token,
            route_version=row.route_version,
            tokens=tokens[row.group_id],
            drained_ids=drained_ids[row.group_id],
            announced_ids=announced_ids[row.group_id],
            deleting=row.deleting,
        )
        for row in connection.execute(sa.select(groups).order_by(groups.c.group_id))
    ]


def _read_operations(connection: Connection) -> list[OperationRow]:
    unfinished = operations.c.state.in_(ADVANCING_STATES)
    actions: dict[int, dict[int, StepAction]] = defaultdict(dict)
    for row in connection.execute(sa.select(steps).join(operations).where(unfinished)):
        actions[row.operation_id][row.partition_id] = StepAction(row.action)
    idle_ms = (now_ms() - operations.c.driven_until).label("idle_ms")
    query = sa.select(operations, idle_ms).where(unfinished).order_by(operations.c.operation_id)
    return [
        OperationRow(
            operation_id=row.operation_id,
            subject_id=row.subject_id,
            state=OperationState(row.state),
            running=row.running is not None,
            idle_ms=row.idle_ms,
            problem=row.problem,
            steps=actions[row.operation_id],
        )
        for row in connection.execute(query)
    ]


def _read_brokers(connection: Connection) -> list[BrokerRow]:
    query = sa.select(brokers).order_by(brokers.c.broker_group)
    return [
        BrokerRow(broker_group=row.broker_group, broker_id=row.broker_id, address=row.address)
        for row in connection.execute(query)
    ]


def _read_refused(connection: Connection) -> list[BrokerRow]:
    is_recent = refused_brokers.c.expires_at > now_ms()
    query = sa.select(refused_brokers).where(is_recent).order_by(refused_brokers.c.broker_group)
    return [
        BrokerRow(broker_group=row.broker_group, broker_id=row.broker_id, address=row.address)
        for row in connection.execute(query)
    ]


CONCURRENT_CALLS_MAX = 16


async def verify_cluster(database: Database, network: Network) -> Verification:
    """Run all checks. A broker that does not respond is a violation, not an error. Raises
    StorageError.
    """
    return await asyncio.to_thread(verify, await read_views(database, network))


async def read_views(
    database: Database,
    network: Network,
    *,
    broker_groups: Collection[str] | None = None,
    timeout_ms: int = CALL_TIMEOUT_MS,
) -> Views:
    """
    Read the database, ask brokers for their partitions, and read the database again.

    Args:
        broker_groups: the broker groups to ask; None means all.

    Raises:
        StorageError
    """
    before = await database.read(read_sql_view)
    slots = asyncio.Semaphore(CONCURRENT_CALLS_MAX)

    async def fetch_hosted(broker: BrokerRow) -> BrokerAnswer:
        hosted_partitions, problem = None, ""
        async with slots:
            try:
                client = BrokerClient(network, broker.address, timeout_ms=timeout_ms)
                hosted_partitions = await client.partitions()
            except KeylaneError as error:
                problem = error.message
        return BrokerAnswer(
            broker_group=broker.broker_group,
            address=broker.address,
            hosted=hosted_partitions,
            problem=problem,
        )

    answers = await asyncio.gather(
        *(
            fetch_hosted(row)
            for row in before.brokers
            if broker_groups is None or row.broker_group in broker_groups
        )
    )
    after = await database.read(read_sql_view)
    return Views(before=before, answers=answers, after=after)
