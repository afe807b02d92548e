"""Many consumers start at once: partitions go to each of them once, and no heartbeat waits for what
others report.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import create_async_engine

from keylane.metaserver.running import running_metaserver
from keylane.metaserver.settings import MetaserverSettings
from keylane.protocol import endpoints
from keylane.protocol.control import CreateSubject, Heartbeat, Join
from keylane.protocol.errors import OutcomeUnknownError
from keylane.rpc.client import MetaClient
from keylane.rpc.http_network import HttpNetwork
from support.brokers.hosting_broker import hosting_broker
from support.postgres import Postgres

SESSIONS = 40
PARTITIONS = 120
TTL_MS = 60_000


class JoinedGroup:
    """A group of a subject with many partitions, at one metaserver."""

    def __init__(self, meta: MetaClient, url: str) -> None:
        self.meta = meta
        self.engine = create_async_engine(url, poolclass=sa.NullPool)

    async def join(self, number: int) -> str:
        session = f"{number:032x}"
        ask = Join(subject="s", group="g", session=session, ttl_ms=TTL_MS)
        async with asyncio.timeout(60):
            while True:
                try:
                    await self.meta.call(endpoints.JOIN, ask)
                except OutcomeUnknownError:  # on a busy machine; a repeat begins no other session
                    continue
                return session

    async def count(self, statement: str) -> int:
        async with self.engine.connect() as connection:
            counted: int = (await connection.execute(sa.text(statement))).scalar_one()
            return counted


@pytest.fixture
async def group(tmp_path: Path, postgres: Postgres) -> AsyncIterator[JoinedGroup]:
    network = HttpNetwork()
    url = postgres.url()
    settings = MetaserverSettings(data=tmp_path, port=0, poll_ms=100, database_url=url)
    async with AsyncExitStack() as stack:
        stack.push_async_callback(network.close)
        running = await stack.enter_async_context(running_metaserver(settings))
        meta = MetaClient(network, [running.address])
        await stack.enter_async_context(hosting_broker(meta, "left"))
        await meta.create_subject(CreateSubject(subject="s", partitions=PARTITIONS))
        yield JoinedGroup(meta, url)


async def test_partitions_are_granted_once_when_many_sessions_join_at_once(group: JoinedGroup):
    """Settled one by one, each session would take partitions from those before it, under further
    tokens.
    """
    await asyncio.gather(*map(group.join, range(1, SESSIONS + 1)))
    async with asyncio.timeout(60):
        while await group.count("SELECT count(DISTINCT session) FROM leases") < SESSIONS:
            await asyncio.sleep(0.05)
    assert await group.count("SELECT count(*) FROM leases WHERE withdrawn") == 0
    assert await group.count("SELECT max(last_token) FROM groups") == PARTITIONS


async def test_heartbeat_is_answered_when_what_it_reports_waits_for_a_held_row(group: JoinedGroup):
    """Its answer would come when the lease of its session has ended at the consumer."""
    session = await group.join(1)
    async with group.engine.connect() as connection, connection.begin():
        await connection.execute(sa.text("SELECT 1 FROM groups FOR UPDATE"))
        async with asyncio.timeout(5):
            grants = await group.meta.call(
                endpoints.HEARTBEAT, Heartbeat(session=session, unreached=("left",))
            )
    assert grants.group_id
    async with asyncio.timeout(60):
        while not await group.count("SELECT count(*) FROM sessions WHERE unreached = 'left'"):
            await asyncio.sleep(0.05)
