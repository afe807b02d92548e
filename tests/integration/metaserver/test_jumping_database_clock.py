"""The calendar of a PostgreSQL server is set forward or back under live metaservers: leases keep
their length.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
import sqlalchemy as sa
from sqlalchemy.engine import Connection

from keylane.metaserver.running import running_metaserver
from keylane.metaserver.settings import MetaserverSettings
from keylane.metaserver.sql.database import SqlDatabase, open_database
from keylane.metaserver.sql.schema import facts
from keylane.protocol import endpoints
from keylane.protocol.clock import SystemClock
from keylane.protocol.control import CreateSubject, Grants, Heartbeat, Join
from keylane.protocol.errors import SessionUnknownError
from keylane.rpc.client import MetaClient
from keylane.rpc.http_network import HttpNetwork
from support.brokers.hosting_broker import hosting_broker
from support.postgres import Postgres

A, B = "a" * 16, "b" * 16
TTL_MS = 2_000


class Calendar:
    """A database whose clock can be set: its `clock_timestamp` is found before PostgreSQL's own."""

    def __init__(self, postgres: Postgres) -> None:
        self.url = postgres.url()
        self._postgres = postgres
        self._name = sa.make_url(self.url).database
        self._run("CREATE SCHEMA moved")
        self._run("CREATE TABLE moved.shift AS SELECT interval '0' AS shift")
        self._run(
            "CREATE FUNCTION moved.clock_timestamp() RETURNS timestamptz LANGUAGE sql VOLATILE "
            "AS 'SELECT pg_catalog.clock_timestamp() + shift FROM moved.shift'"
        )
        self._run(f"ALTER DATABASE {self._name} SET search_path = public, moved, pg_catalog")

    def set_by(self, hours: int) -> None:
        """Set the clock forward or back."""
        self._run(f"UPDATE moved.shift SET shift = interval '{hours} hours'")

    def _run(self, statement: str) -> None:
        self._postgres.execute(statement, database=self._name)


@pytest.fixture
def calendar(postgres: Postgres) -> Calendar:
    return Calendar(postgres)


@pytest.fixture
async def pair(tmp_path: Path, calendar: Calendar) -> AsyncIterator[list[MetaClient]]:
    """Two metaservers of a subject with two partitions."""
    network = HttpNetwork()
    settings = MetaserverSettings(data=tmp_path, port=0, poll_ms=100, database_url=calendar.url)
    async with AsyncExitStack() as stack:
        stack.push_async_callback(network.close)
        running = [await stack.enter_async_context(running_metaserver(settings)) for _ in range(2)]
        metas = [MetaClient(network, [each.address]) for each in running]
        await stack.enter_async_context(hosting_broker(metas[0], "left"))
        await metas[0].create_subject(CreateSubject(subject="s", partitions=2))
        yield metas


def held(grants: Grants) -> dict[int, int]:
    return {grant.partition.partition_id: grant.token for grant in grants.grants}


async def first_owner(meta: MetaClient) -> dict[int, int]:
    """Session A holds both partitions; partition id → token."""
    await meta.call(endpoints.JOIN, Join(subject="s", group="g", session=A, ttl_ms=TTL_MS))
    owned = held(await meta.call(endpoints.HEARTBEAT, Heartbeat(session=A)))
    assert len(owned) == 2
    return owned


@pytest.fixture
async def database(tmp_path: Path, calendar: Calendar) -> AsyncIterator[SqlDatabase]:
    options = {"clock": SystemClock(), "boot": "", "broker_ttl_ms": 1_000}
    async with open_database(folder=tmp_path, url=calendar.url, **options) as database:
        yield database


async def test_work_is_repeated_when_the_clock_jumped(
    database: SqlDatabase, calendar: Calendar
) -> None:
    """A jump in the middle of a work, or before it is refused: it is rolled back and done once."""
    tries: list[str] = []

    def write(connection: Connection) -> None:
        tries.append("write")
        connection.execute(sa.insert(facts).values(name="written", value=str(len(tries))))
        if len(tries) == 1:
            calendar.set_by(1)

    def read(connection: Connection) -> str:
        tries.append("read")
        if len(tries) == 3:
            calendar.set_by(0)
            raise SessionUnknownError
        return connection.execute(
            sa.select(facts.c.value).where(facts.c.name == "written")
        ).scalar_one()

    await database.write(write)
    assert await database.read(read) == "2"
    assert tries == ["write", "write", "read", "read"]


async def test_jump_restarts_the_times_once(
    database: SqlDatabase, calendar: Calendar, caplog: pytest.LogCaptureFixture
) -> None:
    """Any number of concurrent transactions may meet it."""
    query = sa.select(sa.literal(1))
    works = [database.write, database.read] * 10
    await asyncio.gather(*(work(lambda connection: connection.execute(query)) for work in works))
    calendar.set_by(1)
    await asyncio.gather(*(work(lambda connection: connection.execute(query)) for work in works))
    assert caplog.text.count("jumped by +3") == 1


@pytest.mark.parametrize("hours", [1, -1])
async def test_jump_ends_no_lease(pair: list[MetaClient], calendar: Calendar, hours: int) -> None:
    """A live session keeps its partitions and tokens; no other session is granted them."""
    first, second = pair
    before = await first_owner(first)
    calendar.set_by(hours)
    await second.call(
        endpoints.JOIN, Join(subject="s", group="g", session=B, ttl_ms=TTL_MS, suspended=True)
    )
    until = time.monotonic() + 1.5 * TTL_MS / 1000
    while time.monotonic() < until:
        assert held(await first.call(endpoints.HEARTBEAT, Heartbeat(session=A))) == before
        assert not held(await second.call(endpoints.HEARTBEAT, Heartbeat(session=B)))
        await asyncio.sleep(0.1)


@pytest.mark.parametrize("hours", [1, -1])
async def test_silent_consumers_are_replaced_in_time_after_a_jump(
    pair: list[MetaClient], calendar: Calendar, hours: int
) -> None:
    """A crashed consumer keeps its partitions for at most a ttl from the jump, not for an hour, and
    not for less.
    """
    first, second = pair
    joined = time.monotonic()
    before = await first_owner(first)
    calendar.set_by(hours)
    jumped = time.monotonic()
    await second.call(endpoints.JOIN, Join(subject="s", group="g", session=B, ttl_ms=TTL_MS))
    known, taken = -1, {}
    while len(taken) < 2:
        assert time.monotonic() < jumped + TTL_MS / 1000 + 5, "no other session takes over"
        grants = await second.call(
            endpoints.HEARTBEAT, Heartbeat(session=B, known_version=known, wait_ms=500)
        )
        known, taken = grants.version, held(grants)
        assert not taken or time.monotonic() >= joined + TTL_MS / 1000
    assert min(taken.values()) > max(before.values())
