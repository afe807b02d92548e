"""Concurrent transactions of operations on PostgreSQL: one waits for the other and sees what the
other did.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.engine import Connection
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine

from keylane.metaserver.catalogue.creations import replan_creation
from keylane.metaserver.cluster.brokers import store_report
from keylane.metaserver.cluster.subjects import (
    find_subject,
    open_subject,
    plan_subject,
    read_route,
)
from keylane.metaserver.operations.begin import begin_operations
from keylane.metaserver.operations.journal import cancel_operation, claim_operation, finish_round
from keylane.metaserver.sql.database import SqlDatabase, open_database
from keylane.metaserver.sql.schema import operations, subjects
from keylane.protocol.clock import SystemClock
from keylane.protocol.control import BrokerHeartbeat, CreateSubject
from keylane.protocol.errors import Reason
from keylane.protocol.operations import OperationKind, Reshape
from support.postgres import Postgres
from support.raising import raises

EVACUATE = Reshape(kind=OperationKind.EVACUATE, broker_group="g3")
TTL_MS = 600_000


class Meeting:
    """A transaction that is kept open, and a database in which others are begun meanwhile."""

    def __init__(self, engine: AsyncEngine, first: AsyncConnection, database: SqlDatabase) -> None:
        self._engine = engine
        self._first = first
        self._database = database

    async def first(self, work: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return await self._first.run_sync(work, *args, **kwargs)

    async def second(
        self, work: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> asyncio.Task[Any]:
        """Begin a transaction and wait until it seems to be blocked; a deadlock is not retried."""

        async def run() -> Any:
            async with self._engine.begin() as connection:
                return await connection.run_sync(work, *args, **kwargs)

        task = asyncio.create_task(run())
        await asyncio.sleep(0.3)
        return task

    async def commit(self) -> None:
        await self._first.commit()

    async def write(self, work: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return await self._database.write(work, *args, **kwargs)


@pytest.fixture
async def meeting(postgres: Postgres, tmp_path: Path) -> AsyncIterator[Meeting]:
    """With three broker groups, and a subject `s` on the first two."""
    url = postgres.url()
    options = {"clock": SystemClock(), "boot": "", "broker_ttl_ms": TTL_MS}
    engine = create_async_engine(url)
    async with open_database(folder=tmp_path, url=url, **options) as database:
        for group in ("g1", "g2", "g3"):
            report = BrokerHeartbeat(broker_group=group, broker_id=group, address=f"{group}:1")
            await database.write(store_report, report, ttl_ms=TTL_MS)
        await database.write(
            plan_subject, CreateSubject(subject="s", partitions=2), subjects_max=100
        )
        await database.write(open_subject, "s")
        try:
            async with engine.connect() as first:
                yield Meeting(engine, first, database)
        finally:
            await engine.dispose()


def begin(connection: Connection, ask: Reshape) -> list[int]:
    begun = begin_operations(connection, ask, driver="d", lease_ms=60_000)
    return [operation_id for operation_id, _ in begun]


def move(connection: Connection) -> list[int]:
    """Move a partition of `s` to g3."""
    partition_id = read_route(connection, "s").partitions[0].partition_id
    return begin(
        connection,
        Reshape(kind=OperationKind.MOVE, partition_ids=(partition_id,), broker_group="g3"),
    )


async def test_evacuation_sees_a_plan_that_was_uncommitted_when_it_began(meeting: Meeting):
    """The second operation waits for the move, and is refused because of it."""
    await meeting.first(move)
    evacuation = await meeting.second(begin, EVACUATE)
    await meeting.commit()
    with raises(Reason.OPERATION_RUNNING):
        await evacuation


async def test_evacuation_sees_a_creation_that_was_uncommitted_when_it_began(
    meeting: Meeting,
):
    """The operation waits for the plan of the new subject, and is refused because of it."""
    await meeting.first(plan_subject, CreateSubject(subject="new", partitions=3), subjects_max=9)
    evacuation = await meeting.second(begin, EVACUATE)
    await meeting.commit()
    with raises(Reason.CREATION_RUNNING):
        await evacuation


async def test_plan_sees_a_cordon_that_was_uncommitted_when_it_began(meeting: Meeting):
    """A move waits for the evacuation of its target, and is refused; a new subject uses other
    broker groups.
    """
    await meeting.first(begin, EVACUATE)
    moving = await meeting.second(move)
    ask = CreateSubject(subject="new", partitions=3)
    creation = await meeting.second(plan_subject, ask, subjects_max=9)
    await meeting.commit()
    with raises(Reason.BROKER_CORDONED):
        await moving
    await creation
    await meeting.write(open_subject, "new")
    route = await meeting.write(read_route, "new")
    assert {partition.broker_group for partition in route.partitions} == {"g1", "g2"}


async def test_creation_is_planned_anew_once_by_two_metaservers(meeting: Meeting):
    """The second waits for the first, and finds nothing to do; the open partitions cover every LP
    once.
    """
    await meeting.write(plan_subject, CreateSubject(subject="new", partitions=3), subjects_max=9)
    subject = await meeting.write(find_subject, "new")
    report = BrokerHeartbeat(broker_group="g3", broker_id="g3", address="g3:1")
    await meeting.write(store_report, report, ttl_ms=1)
    assert await meeting.first(replan_creation, subject.subject_id)
    second = await meeting.second(replan_creation, subject.subject_id)
    assert not second.done()
    await meeting.commit()
    assert not await second
    await meeting.write(open_subject, "new")
    route = await meeting.write(read_route, "new")
    assert {partition.broker_group for partition in route.partitions} == {"g1", "g2"}


async def test_cancel_and_round_lock_in_one_order(meeting: Meeting):
    """A driver's round waits for a cancel that is half-way, and changes nothing of it."""
    (operation_id,) = await meeting.write(move)
    operation = await meeting.write(claim_operation, operation_id, driver="d", lease_ms=60_000)
    for table, here in (
        (subjects, subjects.c.subject_id == operation.subject_id),
        (operations, operations.c.operation_id == operation_id),
    ):
        await meeting.first(Connection.execute, sa.select(table).where(here).with_for_update())
    hosted = dict.fromkeys(partition.partition_id for partition in operation.targets)
    noted = await meeting.second(finish_round, operation_id, hosted)
    await meeting.first(cancel_operation, operation_id)
    await meeting.commit()
    await noted
    left = await meeting.write(claim_operation, operation_id, driver="d", lease_ms=60_000)
    assert [partition.partition_id for partition in left.targets] == list(hosted)
