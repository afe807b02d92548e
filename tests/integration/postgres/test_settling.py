"""Two metaservers on PostgreSQL, one of them slow: a change between two of its statements breaks no
order.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine
from sqlalchemy.util import await_only

from keylane.metaserver.cluster.brokers import store_report
from keylane.metaserver.cluster.subjects import open_subject, plan_subject, read_route
from keylane.metaserver.groups.lease_rows import read_grants, settle_group
from keylane.metaserver.groups.sessions import join_group
from keylane.metaserver.operations.begin import begin_operations
from keylane.metaserver.operations.journal import claim_operation, finish_round
from keylane.metaserver.operations.views import subject_history
from keylane.metaserver.sql.database import SqlDatabase, open_database
from keylane.protocol.clock import SystemClock
from keylane.protocol.control import BrokerHeartbeat, CreateSubject, Join
from keylane.protocol.operations import OperationKind, OperationState, Reshape
from keylane.protocol.routing import PartitionState
from support.postgres import Postgres
from support.sql.told_groups import hear

TTL_MS = 600_000
STATEMENTS_MAX = 40


class Slow:
    """A metaserver that is paused before one statement of a transaction, and another that resizes a
    subject then.
    """

    def __init__(self, engine: AsyncEngine, database: SqlDatabase) -> None:
        self._engine = engine
        self.database = database

    async def create(self, subject: str) -> None:
        """With one partition."""
        ask = CreateSubject(subject=subject, partitions=1)
        await self.database.write(plan_subject, ask, subjects_max=100)
        await self.database.write(open_subject, subject)

    async def resize(self, subject: str) -> None:
        """To two, with brokers that answer at once; the parent ends at 100."""
        ask = Reshape(kind=OperationKind.RESIZE, subject=subject, partitions=2)
        ((operation_id, _),) = await self.database.write(
            begin_operations, ask, driver="d", lease_ms=TTL_MS
        )
        while operation := await self.database.write(
            claim_operation, operation_id, driver="d", lease_ms=TTL_MS
        ):
            hosts = operation.state in {OperationState.PLAN, OperationState.OPEN}
            done = {
                int(target.partition_id): None if hosts else 100 for target in operation.targets
            }
            heard = [group_id for group_id, _ in operation.groups]
            await self.database.write(finish_round, operation_id, done, group_ids=heard)

    async def run(
        self, subject: str, pause: int, work: Callable[..., Any], *args: Any
    ) -> tuple[Any, bool]:
        """Return what `work` returns if the subject is resized before its statement `pause`, and
        whether it has one.
        """
        seen = 0
        async with self._engine.connect() as connection:

            def paused(*_statement: Any) -> None:
                nonlocal seen
                seen += 1
                if seen == pause:
                    await_only(self.resize(subject))

            async with connection.begin():
                sa.event.listen(connection.sync_connection, "before_cursor_execute", paused)
                answer = await connection.run_sync(work, *args)
        return answer, seen >= pause


@pytest.fixture
async def slow(postgres: Postgres, tmp_path: Path) -> AsyncIterator[Slow]:
    """With two broker groups."""
    url = postgres.url()
    options = {"clock": SystemClock(), "boot": "", "broker_ttl_ms": TTL_MS}
    engine = create_async_engine(url)
    async with open_database(folder=tmp_path, url=url, **options) as database:
        for group in ("g1", "g2"):
            report = BrokerHeartbeat(broker_group=group, broker_id=group, address=f"{group}:1")
            await database.write(store_report, report, ttl_ms=TTL_MS)
        try:
            yield Slow(engine, database)
        finally:
            await engine.dispose()


async def test_child_opened_during_settling_waits_for_its_parent(slow: Slow):
    """The subject is resized before each statement in turn: only the undrained parent is
    granted.
    """
    for pause in range(1, STATEMENTS_MAX):
        subject, session = f"s{pause}", f"{pause:016x}"
        await slow.create(subject)
        ask = Join(subject=subject, group="g", session=session, ttl_ms=TTL_MS)
        row = await slow.database.write(join_group, ask, sessions_max=10)
        await slow.database.write(hear, row.group_id)
        _, paused = await slow.run(subject, pause, settle_group, row.group_id)
        grants = (await slow.database.read(read_grants, session)).grants
        assert len(grants) == 1, f"before statement {pause}: {grants}"
        assert not grants[0].partition.parents
        if not paused:
            break
    assert 8 <= pause < STATEMENTS_MAX


@pytest.mark.parametrize("read", [read_route, subject_history])
async def test_views_read_during_a_resize_are_consistent(slow: Slow, read: Any):
    """The subject is resized before each statement in turn: no partition is shown without its
    parents.
    """
    for pause in range(1, STATEMENTS_MAX):
        subject = f"s{pause}"
        await slow.create(subject)
        answer, paused = await slow.run(subject, pause, read, subject)
        shown = [getattr(answered, "partition", answered) for answered in answer.partitions]
        roots = [partition for partition in shown if not partition.parents]
        assert len(roots) == 1, f"before statement {pause}: {shown}"
        assert all(
            partition.state is PartitionState.OPEN for partition in shown if partition.parents
        )
        if not paused:
            break
    assert 2 <= pause < STATEMENTS_MAX
