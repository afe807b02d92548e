"""An outbox on SQLite, beside a cluster of real processes."""

import asyncio

import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine

from keylane.outbox import Outbox, OutboxSettings, create_tables
from support.cluster import Cluster

SETTINGS = OutboxSettings(rescan_ms=100, lease_ms=1_000)


@pytest.fixture
async def engine(tmp_path):
    engine = create_async_engine(f"sqlite+aiosqlite:///{tmp_path / 'user.db'}")
    await create_tables(engine)
    yield engine
    await engine.dispose()


async def left(engine) -> int:
    async with engine.connect() as connection:
        return (
            await connection.execute(sa.text("SELECT count(*) FROM keylane_outbox"))
        ).scalar_one()


async def drained(engine) -> None:
    async with asyncio.timeout(20):
        while await left(engine):
            await asyncio.sleep(0.01)


async def test_committed_rows_are_stored_in_order_each_once(shared_cluster: Cluster, engine):
    route = await shared_cluster.create("outbox-order", partitions=4)
    sent: dict[bytes, list[bytes]] = {}
    async with Outbox(shared_cluster.meta, engine, settings=SETTINGS) as outbox:
        for turn in range(20):
            async with AsyncSession(engine) as session, session.begin():
                for number in range(10):
                    key = b"key-%d" % (number % 7)
                    value = b"%d-%d" % (turn, number)
                    await outbox.add(session, "outbox-order", value, key=key)
                    sent.setdefault(key, []).append(value)
        await drained(engine)
    await shared_cluster.check_history(route.subject, sent)
