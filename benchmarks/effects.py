"""Measures fenced effects on PostgreSQL, each commit on the disk: in batches, and one in a
transaction; prints a JSON line.

Run as `python benchmarks/effects.py META SUBJECT COUNT`.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from pathlib import Path
from typing import Any

import sqlalchemy as sa
import uvloop
from roles import KEYS, VALUE
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, create_async_engine

from keylane import Consumer, ConsumerSettings, Message, Producer
from keylane.sink import FencedSession, create_tables, fenced_batch

sys.path.append(str(Path(__file__).parent.parent / "tests"))
from support import postgres

BATCH = 1_000
SINGLE_SHARE = 20
"""A message of this number is measured in a transaction of its own."""
CONCURRENCY = 32
ENTRIES = sa.Table(
    "entries",
    sa.MetaData(),
    sa.Column("id", sa.BigInteger, primary_key=True),
    sa.Column("order_key", sa.LargeBinary, nullable=False),
    sa.Column("value", sa.LargeBinary, nullable=False),
)


async def in_batches(meta: str, subject: str, count: int, engine: AsyncEngine) -> float:
    """Return the seconds for `count` effects, with BATCH effects per transaction."""
    remaining = count
    async with Consumer(meta, subject=subject, group="batches") as consumer:
        started, batch = time.monotonic(), []
        async for message in consumer:
            batch.append(message)
            if len(batch) < min(BATCH, remaining):
                continue
            async with engine.begin() as connection, fenced_batch(connection, batch) as unseen:
                rows = [{"order_key": each.key, "value": each.value} for each in unseen]
                await connection.execute(sa.insert(ENTRIES), rows)
            for each in batch:
                await each.ack()
            remaining -= len(batch)
            batch = []
            if not remaining:
                break
        return time.monotonic() - started


async def one_by_one(meta: str, subject: str, count: int, engine: AsyncEngine) -> float:
    """Return the seconds for `count` effects, with one effect per transaction."""
    remaining, all_handled = count, asyncio.Event()

    async def handle(message: Message) -> None:
        nonlocal remaining
        async with AsyncSession(engine) as session, FencedSession(session, message):
            row = {"order_key": message.key, "value": message.value}
            await session.execute(sa.insert(ENTRIES), [row])
        remaining -= 1
        if not remaining:
            all_handled.set()

    started = time.monotonic()
    async with Consumer(
        meta,
        subject=subject,
        group="single",
        handler=handle,
        settings=ConsumerSettings(concurrency=CONCURRENCY),
    ):
        await all_handled.wait()
    return time.monotonic() - started


async def measure(meta: str, subject: str, count: int, url: str) -> dict[str, Any]:
    """Send, then write entries in both ways."""
    engine = create_async_engine(url, pool_size=CONCURRENCY)
    await create_tables(engine)
    async with engine.begin() as connection:
        await connection.run_sync(ENTRIES.create)
    async with Producer(meta) as producer:
        for index in range(count):
            await producer.drain()
            producer.send(subject, VALUE, key=KEYS[index % 10_000])
            if index % 100 == 0:
                await asyncio.sleep(0)
        await producer.flush()
    batches = await in_batches(meta, subject, count, engine)
    single_count = count // SINGLE_SHARE
    single = await one_by_one(meta, subject, single_count, engine)
    await engine.dispose()
    return {"batch_seconds": batches, "single_seconds": single, "single_count": single_count}


def main() -> None:
    """Measure on a server of its own."""
    meta, subject, count = sys.argv[1:]
    postgres.OPTIONS["fsync"] = "on"
    with postgres.running_postgres() as server:
        url = server.url()
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            print(json.dumps(runner.run(measure(meta, subject, int(count), url))), flush=True)


if __name__ == "__main__":
    main()
