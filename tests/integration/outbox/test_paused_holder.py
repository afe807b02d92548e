"""A process that is paused while it holds the lease, and goes on after another one has taken it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from keylane.outbox import Outbox, OutboxSettings, create_tables, lease
from keylane.outbox.database import OutboxDatabase
from keylane.outbox.tables import OutboxTables
from support.cluster import Cluster, pause, resume
from support.outbox.rows import drained
from support.postgres import Postgres

SETTINGS = OutboxSettings(rescan_ms=50, lease_ms=500, in_flight_max=1, call_timeout_ms=60_000)


class PausableDatabase(OutboxDatabase):
    """The database of a process that can be paused between two transactions."""

    def __init__(self, engine: AsyncEngine) -> None:
        super().__init__(engine, OutboxTables())
        self.running = asyncio.Event()
        self.running.set()

    async def run(self, work: Any, *args: Any, **kwargs: Any) -> Any:
        await self.running.wait()
        return await super().run(work, *args, **kwargs)


async def recorded(engine: AsyncEngine, subject: str) -> list[bytes]:
    """The values of a subject's rows that are in batches."""
    ask = sa.text(
        "SELECT value FROM keylane_outbox WHERE subject = :s AND batch_id > 0 ORDER BY id"
    )
    async with engine.connect() as connection:
        return [bytes(value) for (value,) in await connection.execute(ask, {"s": subject})]


async def add(engine: AsyncEngine, outbox: Outbox, subject: str, value: bytes) -> None:
    async with engine.begin() as connection:
        await outbox.add(connection, subject, value, key=b"k")


def holds(outbox: Outbox) -> bool:
    return outbox._drainer is not None and outbox._drainer.token is not None


@pytest.mark.cluster(brokers=1)
async def test_holder_records_nothing_when_its_lease_was_taken_while_it_was_paused(
    cluster: Cluster, engine: AsyncEngine
):
    """It would send the newer row of a key beside the older one, which the new holder is
    sending.
    """
    broker = cluster.brokers[0].process.pid
    await cluster.create("s", partitions=1)
    database = PausableDatabase(engine)
    paused = Outbox(cluster.meta, engine, settings=SETTINGS, _database=database)
    taking = Outbox(cluster.meta, engine, settings=SETTINGS)
    async with asyncio.timeout(60), paused:
        await add(engine, paused, "created-later", b"keeps the lease busy")
        await paused.send("s", b"first", key=b"k")
        assert holds(paused)
        database.running.clear()
        async with taking:
            while not holds(taking):
                await asyncio.sleep(0.01)
            pause(broker)
            try:
                await add(engine, taking, "s", b"second")
                while await recorded(engine, "s") != [b"second"]:
                    await asyncio.sleep(0.01)
                await add(engine, taking, "s", b"third")
                database.running.set()
                while holds(paused) and len(await recorded(engine, "s")) == 1:
                    await asyncio.sleep(0.01)
                assert await recorded(engine, "s") == [b"second"]
            finally:
                resume(broker)
            await cluster.create("created-later", partitions=1)
            await drained(engine)
    await cluster.check_history("s", {b"k": [b"first", b"second", b"third"]})


@pytest.mark.cluster(brokers=1)
async def test_lease_is_taken_when_its_holder_stands_still_in_a_transaction(
    cluster: Cluster, postgres: Postgres, monkeypatch: pytest.MonkeyPatch
):
    """PostgreSQL ends that transaction, which has the lease's row locked; the holder commits
    nothing.
    """
    monkeypatch.setattr(lease, "IDLE_MS_MIN", 500)
    engine = create_async_engine(postgres.url())
    try:
        await create_tables(engine)
        await cluster.create("s", partitions=1)
        async with asyncio.timeout(60), engine.connect() as stopped_error:
            token = await stopped_error.run_sync(
                lease.acquire, OutboxTables(), owner="stopped", lease_ms=500
            )
            assert token == 1
            async with Outbox(cluster.meta, engine, settings=SETTINGS) as outbox:
                await outbox.send("s", b"value", key=b"k")
            with pytest.raises(DBAPIError):
                await stopped_error.execute(sa.text("SELECT 1"))
    finally:
        await engine.dispose()
