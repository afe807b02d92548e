"""A person, or a metaserver that stands still, holds a row of one consumer group: the other groups
go on.
"""

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
from keylane.protocol import endpoints
from keylane.protocol.control import CreateSubject, Grants, Heartbeat, Join
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
        await self.meta.call(
            endpoints.JOIN, Join(subject="s", group=group, session=session, ttl_ms=ttl_ms)
        )

    async def mark_groups_incomplete(self) -> None:
        async with self._engine.begin() as connection:
            await connection.execute(sa.text("UPDATE groups SET told = FALSE"))

    async def all_told(self, *but: str) -> None:
        """Wait until brokers were told of all groups: what is heard of several new ones is stored
        in one transaction.
        """
        async with self._engine.connect() as connection, asyncio.timeout(LIMIT_S):
            untold = sa.select(sa.func.count()).select_from(sa.text("groups"))
            untold = untold.where(sa.text("NOT told"), sa.column("name").not_in(but))
            while (await connection.execute(untold)).scalar_one():
                await connection.rollback()
                await asyncio.sleep(0.05)

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
    settings = MetaserverSettings(
        data=tmp_path, port=0, poll_ms=100, expire_ms=200, database_url=url
    )
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
        late = asyncio.create_task(rows.meta.call(endpoints.HEARTBEAT, Heartbeat(session=HELD)))
        await asyncio.sleep(0.1)
        async with asyncio.timeout(LIMIT_S):
            for _ in range(3):
                await rows.meta.call(endpoints.HEARTBEAT, Heartbeat(session=FREE))
        assert not late.done()
    assert isinstance(await late, Grants)


@pytest.mark.parametrize("group_count", [1, 30])
async def test_session_is_renewed_when_the_rows_of_many_others_are_held(
    rows: HeldRows, group_count: int
):
    """More of them wait than the metaserver has connections; each is renewed when its row is free
    again.
    """
    many = [f"{number:016x}" for number in range(30)]
    for number, session in enumerate(many):
        await rows.join(session, f"g{number % group_count}")
    await rows.join(FREE, "h")
    async with rows.held(f"sessions WHERE session <> '{FREE}'"):
        late = [
            asyncio.create_task(rows.meta.call(endpoints.HEARTBEAT, Heartbeat(session=each)))
            for each in many
        ]
        await asyncio.sleep(0.2)
        async with asyncio.timeout(LIMIT_S):
            for _ in range(3):
                await rows.meta.call(endpoints.HEARTBEAT, Heartbeat(session=FREE))
        assert not any(each.done() for each in late)
    assert all(isinstance(each, Grants) for each in await asyncio.gather(*late))


async def test_member_is_renewed_when_the_row_of_another_member_is_held(rows: HeldRows):
    """The one whose row is held asks again and again, as its consumer does."""
    for session in (HELD, FREE):
        await rows.join(session, "g")
    async with rows.held(f"sessions WHERE session = '{HELD}'"):
        late = [
            asyncio.create_task(rows.meta.call(endpoints.HEARTBEAT, Heartbeat(session=HELD)))
            for _ in range(3)
        ]
        await asyncio.sleep(0.2)
        async with asyncio.timeout(LIMIT_S):
            for _ in range(3):
                await rows.meta.call(endpoints.HEARTBEAT, Heartbeat(session=FREE))
        assert not any(each.done() for each in late)
    assert all(isinstance(each, Grants) for each in await asyncio.gather(*late))


async def test_lost_consumer_is_replaced_when_the_row_of_another_group_is_held(rows: HeldRows):
    """The group whose row is held comes first, and cannot be settled."""
    await rows.join(HELD, "g", ttl_ms=SHORT_TTL_MS)
    await rows.join(FREE, "h", ttl_ms=SHORT_TTL_MS)
    await rows.join(SECOND, "h")
    async with rows.held("groups WHERE name = 'g'"), asyncio.timeout(LIMIT_S):
        while not (await rows.meta.call(endpoints.HEARTBEAT, Heartbeat(session=SECOND))).grants:
            await asyncio.sleep(0.1)


async def test_session_is_renewed_when_many_of_a_held_group_have_news(rows: HeldRows):
    """More of them wait for the row of their group than the metaserver has connections."""
    many = [f"{number:016x}" for number in range(30)]
    for session in many:
        await rows.join(session, "g")
    await rows.join(FREE, "h")
    async with rows.held("groups WHERE name = 'g'"):
        late = [
            asyncio.create_task(
                rows.meta.call(endpoints.HEARTBEAT, Heartbeat(session=each, unreached=("left",)))
            )
            for each in many
        ]
        await asyncio.sleep(0.2)
        async with asyncio.timeout(LIMIT_S):
            for _ in range(3):
                await rows.meta.call(endpoints.HEARTBEAT, Heartbeat(session=FREE))
    await asyncio.gather(*late, return_exceptions=True)


async def test_consumer_joins_when_many_wait_for_a_held_group(rows: HeldRows):
    await rows.join(FREE, "h")
    await rows.join(HELD, "g")
    await rows.all_told()
    async with rows.held("groups WHERE name = 'g'"):
        late = [asyncio.create_task(rows.join(f"{number:016x}", "g")) for number in range(30)]
        await asyncio.sleep(0.2)
        async with asyncio.timeout(LIMIT_S):
            await rows.join(SECOND, "h")
    await asyncio.gather(*late, return_exceptions=True)


async def test_group_is_told_when_the_row_of_another_new_one_is_held(rows: HeldRows):
    """The rows of both are locked in one transaction, which held the one until it had the other."""
    for session, group in ((HELD, "g"), (FREE, "h")):
        await rows.join(session, group)
    await rows.all_told()
    await rows.mark_groups_incomplete()
    async with rows.held("groups WHERE name = 'g'"):
        await rows.all_told("g")
    await rows.all_told()
