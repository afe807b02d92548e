"""A person, or a metaserver that stands still, holds a row of one consumer group: the other groups go on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import create_async_engine

from keylane.metaserver.running import running_metaserver
from keylane.metaserver.settings import MetaserverSettings
from keylane.protocol.control import CreateSubject, Grants, Heartbeat, Join
from keylane.protocol.http.at_once import HeartbeatNews, Heartbeats
from keylane.rpc.client import MetaClient
from keylane.rpc.http_network import HttpNetwork
from support.brokers.hosting_broker import hosting_broker
from support.postgres import Postgres

HELD, FREE, SECOND = "a" * 16, "b" * 16, "c" * 16
TTL_MS = 60_000
SHORT_TTL_MS = 1_000
LIMIT_S = 4.0
"""Less than a metaserver waits for an answer of the database."""


class HeldRows:
    """A metaserver of a subject with one partition, and its database."""

    def __init__(self, meta: MetaClient, url: str) -> None:
        self.meta = meta
        self._engine = create_async_engine(url, poolclass=sa.NullPool)

    async def join(self, session: str, group: str, *, ttl_ms: int = TTL_MS) -> None:
        await self.meta.join(Join(subject="s", group=group, session=session, ttl_ms=ttl_ms))

    async def news(self, asks: Heartbeats) -> dict[str, HeartbeatNews]:
        answers = await self.meta.heartbeats(asks, wait_ms=0, timeout_ms=10_000)
        return {news.session: news for news in answers.news}

    @asynccontextmanager
    async def held(self, chosen: str) -> AsyncIterator[None]:
        """A transaction elsewhere holds these rows."""
        async with self._engine.connect() as connection, connection.begin():
            await connection.execute(sa.text(f"SELECT 1 FROM {chosen} FOR UPDATE"))
            yield


@pytest.fixture
async def rows(tmp_path: Path, postgres: Postgres) -> AsyncIterator[HeldRows]:
    url = postgres.url()
    network = HttpNetwork()
    settings = MetaserverSettings(data=tmp_path, port=0, poll_ms=100, database_url=url)
    async with AsyncExitStack() as stack:
        stack.push_async_callback(network.close)
        running = await stack.enter_async_context(running_metaserver(settings))
        meta = MetaClient(network, [running.address])
        await stack.enter_async_context(hosting_broker(meta, "left"))
        await meta.create_subject(CreateSubject(subject="s", partitions=1))
        yield HeldRows(meta, url)


async def test_session_is_renewed_when_the_row_of_another_one_is_held(rows: HeldRows):
    """They share one statement; whose row is held is renewed when it is free again."""
    for session, group in ((HELD, "g"), (FREE, "h")):
        await rows.join(session, group)
    async with rows.held(f"sessions WHERE session = '{HELD}'"):
        late = asyncio.create_task(rows.meta.heartbeat(Heartbeat(session=HELD)))
        await asyncio.sleep(0.1)
        async with asyncio.timeout(LIMIT_S):
            for _ in range(3):
                await rows.meta.heartbeat(Heartbeat(session=FREE))
        assert not late.done()
    assert isinstance(await late, Grants)


async def test_sessions_of_one_call_are_answered_when_the_row_of_one_is_held(rows: HeldRows):
    """The one whose row is held is told so, and has not ended."""
    for session, group in ((HELD, "g"), (FREE, "h"), (SECOND, "i")):
        await rows.join(session, group)
    asks = Heartbeats(
        heartbeats=tuple(Heartbeat(session=session) for session in (HELD, FREE, SECOND))
    )
    async with rows.held(f"sessions WHERE session = '{HELD}'"), asyncio.timeout(LIMIT_S):
        told = await rows.news(asks)
        assert told[HELD].error is not None
        assert "StorageError" in repr(told[HELD].error.error())
        assert told[FREE].grants is not None
        assert told[SECOND].grants is not None
    told = await rows.news(asks)
    assert told[HELD].grants is not None


async def test_lost_consumer_is_replaced_when_the_row_of_another_group_is_held(rows: HeldRows):
    """The group whose row is held comes first, and cannot be settled."""
    await rows.join(HELD, "g", ttl_ms=SHORT_TTL_MS)
    await rows.join(FREE, "h", ttl_ms=SHORT_TTL_MS)
    await rows.join(SECOND, "h")
    async with rows.held("groups WHERE name = 'g'"), asyncio.timeout(LIMIT_S):
        while not (await rows.meta.heartbeat(Heartbeat(session=SECOND))).grants:
            await asyncio.sleep(0.1)
