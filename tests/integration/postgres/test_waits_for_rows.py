"""Two transactions on PostgreSQL, one of which waits for a row of the other: what it does then fits
what the other has stored.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import sqlalchemy as sa
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from keylane.metaserver.cluster.brokers import cordon_broker, renew_broker, store_report
from keylane.metaserver.cluster.removals import complete_removals
from keylane.metaserver.cluster.subjects import open_subject, plan_subject
from keylane.metaserver.groups.lease_rows import read_grants
from keylane.metaserver.groups.locked_group import raise_group_versions
from keylane.metaserver.groups.sessions import join_group, leave_group, renew_sessions
from keylane.metaserver.operations.begin import begin_operations
from keylane.metaserver.operations.journal import finish_round
from keylane.metaserver.removals.begin import begin_group_deletion, begin_subject_deletion
from keylane.metaserver.resets.live import plan_live_reset
from keylane.metaserver.resets.rows import begin_reset, end_reset, read_reset_scope
from keylane.metaserver.retention.idle_groups import start_idle_times
from keylane.metaserver.sql.database import SqlDatabase, open_database
from keylane.metaserver.sql.schema import brokers, groups, name_limits, removals, subjects
from keylane.protocol.clock import SystemClock
from keylane.protocol.control import (
    BrokerHeartbeat,
    CreateSubject,
    DeleteGroup,
    DeleteSubject,
    Join,
)
from keylane.protocol.errors import OverloadedError, Reason
from keylane.protocol.operations import OperationKind, Reshape
from keylane.protocol.progress import ResetGroup, ResetTo
from support.postgres import Postgres
from support.raising import raises
from support.sql.told_groups import hear, settle_group

TTL_MS = 600_000
A, B = "a" * 16, "b" * 16
GROUP_ID = 1
ASK = ResetGroup(to=ResetTo.EARLIEST, live=True)
ANSWER = '{"subject":"s","group":"g","cursors":[]}'
_waiting = sa.text(
    "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND "
    "wait_event_type = 'Lock'"
)
Work = Callable[..., Any]


def report_of(group: str) -> BrokerHeartbeat:
    return BrokerHeartbeat(broker_group=group, broker_id=group, address=f"{group}:1")


class WaitingPair:
    """Two metaservers; subject `s` with two partitions, and group `g` with one session."""

    def __init__(self, engine: AsyncEngine, database: SqlDatabase) -> None:
        self._engine = engine
        self.database = database

    async def run(self, work: Work, *args: Any, **kwargs: Any) -> Any:
        return await self.database.write(work, *args, **kwargs)

    async def join(self, session: str) -> None:
        ask = Join(subject="s", group="g", session=session, ttl_ms=TTL_MS)
        await self.run(join_group, ask, sessions_max=10)

    async def report(self, group: str) -> None:
        await self.run(store_report, report_of(group), ttl_ms=TTL_MS)

    async def rows_of(self, chosen: sa.Select[Any]) -> list[Any]:
        return list(await self.run(lambda connection: connection.execute(chosen).all()))

    @asynccontextmanager
    async def held(self, first: Work) -> AsyncIterator[None]:
        """What `first` has done is committed at the end."""
        async with self._engine.connect() as connection, connection.begin():
            await connection.run_sync(first)
            yield

    async def until_waiting(self) -> None:
        """Wait until a transaction waits for a lock."""
        async with asyncio.timeout(60):
            while not await self._waits():
                await asyncio.sleep(0.01)

    async def meet(self, first: Work, second: Work) -> Any:
        """Return what `second` returns, which begins before the end of `first` and waits for a row
        of it.
        """

        async def other() -> Any:
            async with self._engine.begin() as connection:
                return await connection.run_sync(second)

        async with self.held(first):
            waiting = asyncio.create_task(other())
            seen = asyncio.create_task(self.until_waiting())
            await asyncio.wait({waiting, seen}, return_when=asyncio.FIRST_COMPLETED)
            assert not waiting.done(), "it waits for no row"
            await seen
        return await waiting

    async def impatient(self, work: Work) -> Any:
        """Return what it returns. Raises DBAPIError: it waits for a lock."""
        async with self._engine.begin() as connection:
            await connection.execute(sa.text("SET LOCAL lock_timeout = '1s'"))
            return await connection.run_sync(work)

    async def beside(self, first: Work, second: Work) -> Any:
        """Return what `second` returns while `first` is not committed. Raises DBAPIError: it waits
        for a row of it.
        """
        async with self.held(first):
            return await self.impatient(second)

    async def _waits(self) -> bool:
        async with self._engine.connect() as connection:
            return bool((await connection.execute(_waiting)).scalar_one())


@pytest.fixture
async def pair(postgres: Postgres, tmp_path: Path) -> AsyncIterator[WaitingPair]:
    url = postgres.url()
    options = {"clock": SystemClock(), "boot": "", "broker_ttl_ms": TTL_MS}
    engine = create_async_engine(url)
    async with open_database(folder=tmp_path, url=url, **options) as database:
        made = WaitingPair(engine, database)
        await made.report("g1")
        await database.write(plan_subject, CreateSubject(subject="s", partitions=2), subjects_max=9)
        await database.write(open_subject, "s")
        await made.join(A)
        await made.run(hear, GROUP_ID)
        try:
            yield made
        finally:
            await engine.dispose()


async def test_live_reset_takes_all_partitions_when_a_settling_waited_for_it(pair: WaitingPair):
    """The settling began before the reset was stored: it does not count as settled what the reset
    waits for.
    """
    await pair.run(settle_group, GROUP_ID)
    await pair.join(B)  # there is something to settle
    await pair.meet(
        lambda connection: plan_live_reset(connection, GROUP_ID, ASK),
        lambda connection: settle_group(connection, GROUP_ID),
    )
    await pair.run(settle_group, GROUP_ID)
    for session in (A, B):
        assert not (await pair.run(read_grants, session)).grants


async def test_group_is_granted_again_when_a_settling_waited_for_the_end_of_its_reset(
    pair: WaitingPair,
):
    """The settling began while the reset was pending: it does not leave the group without any
    grant.
    """
    reset_id = await pair.run(plan_live_reset, GROUP_ID, ASK)
    await pair.run(settle_group, GROUP_ID)
    scope = await pair.run(read_reset_scope, "s", "g", ASK)
    tokens = await pair.run(begin_reset, scope, holder="h", lease_ms=TTL_MS, reset_id=reset_id)
    cursors = dict.fromkeys(tokens, 0)
    answered = (reset_id, ANSWER)
    await pair.meet(
        lambda connection: end_reset(
            connection, GROUP_ID, tokens, cursors, holder="h", recorded_answer=answered
        ),
        lambda connection: settle_group(connection, GROUP_ID),
    )
    await pair.run(settle_group, GROUP_ID)
    assert len((await pair.run(read_grants, A)).grants) == 2


async def test_session_is_renewed_when_its_grants_changed_meanwhile(pair: WaitingPair):
    """The heartbeat waits for the row, and is answered as one of a live session."""
    renewed = await pair.meet(
        lambda connection: raise_group_versions(connection, [GROUP_ID]),
        lambda connection: renew_sessions(connection, [A]),
    )
    assert list(renewed) == [A]


async def test_group_does_not_count_as_idle_when_a_session_joined_meanwhile(pair: WaitingPair):
    """The look for idle groups waits for the join; counted from then on, the group would expire
    with its next session.
    """
    await pair.run(leave_group, A)
    ask = Join(subject="s", group="g", session=B, ttl_ms=TTL_MS)
    await pair.meet(
        lambda connection: join_group(connection, ask, sessions_max=10), start_idle_times
    )
    assert await pair.rows_of(sa.select(groups.c.idle_since)) == [(None,)]


async def test_deletion_ends_when_two_metaservers_note_its_last_removals(pair: WaitingPair):
    """Each has asked one of two brokers, and neither sees the other's row go before its own
    transaction ends.
    """
    await pair.run(begin_subject_deletion, "s", DeleteSubject(force=True))
    await pair.meet(
        lambda connection: complete_removals(connection, {(1, 0): 0}),
        lambda connection: complete_removals(connection, {(2, 0): 0}),
    )
    assert await pair.rows_of(sa.select(subjects.c.name)) == []


async def test_deletion_of_a_group_ends_when_two_metaservers_note_its_last_removals(
    pair: WaitingPair,
):
    await pair.run(begin_group_deletion, "s", "g", DeleteGroup(force=True))
    await pair.meet(
        lambda connection: complete_removals(connection, {(1, GROUP_ID): 1}),
        lambda connection: complete_removals(connection, {(2, GROUP_ID): 1}),
    )
    assert await pair.rows_of(sa.select(groups.c.name)) == []


async def test_deletion_that_was_left_without_removals_ends_when_it_is_repeated(pair: WaitingPair):
    """As an earlier version could leave it."""
    await pair.run(begin_group_deletion, "s", "g", DeleteGroup(force=True))
    await pair.run(lambda connection: connection.execute(sa.delete(removals)).rowcount)
    await pair.run(begin_group_deletion, "s", "g", DeleteGroup())
    assert await pair.rows_of(sa.select(groups.c.name)) == []

    await pair.run(begin_subject_deletion, "s", DeleteSubject())
    await pair.run(lambda connection: connection.execute(sa.delete(removals)).rowcount)
    await pair.run(begin_subject_deletion, "s", DeleteSubject())
    assert await pair.rows_of(sa.select(subjects.c.name)) == []


async def test_lost_folder_is_refused_when_its_report_waited_for_the_loss(pair: WaitingPair):
    """Its broker comes back while an operator accepts the loss: it must not serve what is given
    up.
    """
    await pair.report("g2")
    silent = sa.update(brokers).where(brokers.c.broker_group == "g1").values(expires_at=0)
    await pair.run(lambda connection: connection.execute(silent).rowcount)
    ask = Reshape(kind=OperationKind.EVACUATE, broker_group="g1", accept_loss=True)

    def accept(connection: sa.Connection) -> None:
        ((operation_id, _),) = begin_operations(connection, ask, driver="d", lease_ms=TTL_MS)
        finish_round(connection, operation_id, {3: None, 4: None}, group_ids=[GROUP_ID])

    with raises(Reason.FOLDER_GIVEN_UP):
        await pair.meet(
            accept, lambda connection: store_report(connection, report_of("g1"), ttl_ms=TTL_MS)
        )


def new_plan(connection: sa.Connection, name: str = "new") -> None:
    plan_subject(connection, CreateSubject(subject=name, partitions=1), subjects_max=9)


async def test_second_subject_of_a_pattern_is_refused_when_the_first_was_planned_meanwhile(
    pair: WaitingPair,
):
    """Plans share the locks of brokers: both counted the subjects that there were before, and the
    limit was passed.
    """
    limit = {"name": "new.*", "subjects": 1, "scheduled_bytes": 0}
    await pair.run(lambda connection: connection.execute(sa.insert(name_limits), limit))

    def plan(name: str) -> Work:
        ask = CreateSubject(subject=name, partitions=1)
        return lambda connection: plan_subject(connection, ask, subjects_max=9, limited=True)

    with pytest.raises(OverloadedError, match="has 1 subject, and the limit is 1"):
        await pair.meet(plan("new.a"), plan("new.b"))


def moving_round(connection: sa.Connection) -> None:
    """A move of a partition begins, and the child's broker has answered."""
    ask = Reshape(kind=OperationKind.MOVE, partition_ids=(1,), broker_group="g2")
    ((operation_id, _),) = begin_operations(connection, ask, driver="d", lease_ms=TTL_MS)
    finish_round(connection, operation_id, {3: None}, group_ids=[GROUP_ID], openings={3: ""})


@pytest.mark.parametrize("work", [new_plan, moving_round])
@pytest.mark.parametrize("group", ["g1", "g2"])
async def test_renewal_of_a_broker_waits_for_no_plan_and_no_round(
    pair: WaitingPair, work: Work, group: str
):
    """They share their locks: while others of them follow, the broker would not be renewed, and
    count as silent.
    """
    await pair.report("g2")
    assert await pair.beside(
        work, lambda connection: renew_broker(connection, report_of(group), ttl_ms=TTL_MS)
    )


async def test_new_opening_of_a_broker_waits_for_a_round(pair: WaitingPair):
    """The round has read the opening, and notes what that opening has answered."""
    await pair.report("g2")
    opened = msgspec.structs.replace(report_of("g2"), opening="later")
    await pair.meet(
        moving_round, lambda connection: store_report(connection, opened, ttl_ms=TTL_MS)
    )


async def test_cordon_and_plan_wait_for_each_other(pair: WaitingPair):
    def cordon(connection: sa.Connection) -> None:
        cordon_broker(connection, "g1", True)

    await pair.meet(new_plan, cordon)
    await pair.run(cordon_broker, "g1", False)
    with raises(Reason.NOT_ENOUGH_BROKERS):
        await pair.meet(cordon, lambda connection: new_plan(connection, "later"))


async def test_plan_that_comes_later_does_not_pass_the_report_of_a_new_opening(pair: WaitingPair):
    """The report waits for a round; plans and rounds that follow each other would keep it out
    without end.
    """
    await pair.report("g2")
    opened = msgspec.structs.replace(report_of("g2"), opening="later")

    async with pair.held(moving_round):
        reporting = asyncio.create_task(pair.run(store_report, opened, ttl_ms=TTL_MS))
        await pair.until_waiting()
        with pytest.raises(DBAPIError, match="lock timeout"):
            await pair.impatient(new_plan)
    await reporting
    await pair.impatient(new_plan)
