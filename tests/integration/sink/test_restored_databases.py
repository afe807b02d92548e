"""A user's database that is restored from a copy of some minutes ago, beside a cluster that went
on: what docs/EFFECTS.md says.
"""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, create_async_engine

from keylane import Consumer, Message, Producer
from keylane.outbox import Outbox
from keylane.outbox import create_tables as create_outbox
from keylane.sink import FencedSession, create_tables
from support.cluster import Cluster, eventually
from support.server_process import run_keylane
from support.sink.entries import ENTRIES, entries_by_key, entry

KEY = b"account"
CREATE = sa.text("CREATE TABLE entries (id INTEGER PRIMARY KEY, order_key, value, token)")


def engine_at(path: Path) -> AsyncEngine:
    return create_async_engine(f"sqlite+aiosqlite:///{path}")


async def handle_all(cluster: Cluster, subject: str, engine: AsyncEngine, count: int) -> None:
    """Consume until `count` messages were handled, and their acks are durable."""
    handled = []

    async def handle(message: Message) -> None:
        async with AsyncSession(engine) as session, FencedSession(session, message) as todo:
            if todo:
                await session.execute(sa.insert(ENTRIES).values(entry(message)))
        handled.append(message.offset)

    async with Consumer(cluster.meta, subject=subject, group="ledger", handler=handle):
        await eventually(lambda: len(handled) >= count)


async def test_reset_repeats_exactly_the_effects_that_a_restored_database_lacks(
    shared_cluster: Cluster, tmp_path: Path
):
    subject, path, copy = "restored-effects", tmp_path / "bank.db", tmp_path / "copy.db"
    await shared_cluster.create(subject, partitions=1)
    engine = engine_at(path)
    await create_tables(engine)
    async with engine.begin() as connection:
        await connection.execute(CREATE)
    async with asyncio.timeout(90), Producer(shared_cluster.meta) as producer:
        for number in range(4):
            await producer.send(subject, b"%d" % number, key=KEY)
        await handle_all(shared_cluster, subject, engine, 4)
        await engine.dispose()
        shutil.copy(path, copy)
        for number in range(4, 10):
            await producer.send(subject, b"%d" % number, key=KEY)
        await handle_all(shared_cluster, subject, engine, 6)
        await engine.dispose()
        shutil.move(copy, path)
        await producer.send(subject, b"10", key=KEY)
        await handle_all(shared_cluster, subject, engine, 1)
        had = await entries_by_key(engine)
        assert had[KEY] == [b"%d" % number for number in (0, 1, 2, 3, 10)], "the others are acked"
        reset = await asyncio.to_thread(
            run_keylane,
            *("group", "reset", subject, "ledger", "--to", "earliest"),
            *("--meta", shared_cluster.meta),
        )
        assert reset.returncode == 0, reset.stderr
        await handle_all(shared_cluster, subject, engine, 11)
        assert sorted((await entries_by_key(engine))[KEY], key=int) == [
            b"%d" % n for n in range(11)
        ]
    await engine.dispose()


async def test_rows_that_a_restored_database_has_again_are_stored_twice(
    shared_cluster: Cluster, tmp_path: Path
):
    """With another `message_id` each time; rows that were added after the copy stay stored, and no
    row tells of them.
    """
    subject, path, copy = "restored-outbox", tmp_path / "shop.db", tmp_path / "copy.db"
    await shared_cluster.create(subject, partitions=1)
    engine, got = engine_at(path), []
    await create_outbox(engine)

    async def add(*values: bytes) -> None:
        adding = Outbox(shared_cluster.meta, engine)
        async with engine.begin() as connection:
            for value in values:
                await adding.add(connection, subject, value, key=KEY)

    async def handle(message: Message) -> None:
        got.append(message.value)

    async with (
        asyncio.timeout(90),
        Consumer(shared_cluster.meta, subject=subject, group="g", handler=handle),
    ):
        await add(b"1", b"2")
        await engine.dispose()
        shutil.copy(path, copy)
        await add(b"3")
        async with Outbox(shared_cluster.meta, engine):
            await eventually(lambda: len(got) == 3)
        await engine.dispose()
        shutil.move(copy, path)
        await add(b"4")
        async with Outbox(shared_cluster.meta, engine):
            await eventually(lambda: len(got) == 6)
    assert got == [b"1", b"2", b"3", b"1", b"2", b"4"]
    await engine.dispose()
