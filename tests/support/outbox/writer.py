"""A user's program with an outbox, to be killed: it commits orders, rolls some back, and sends what
it committed.

It ends itself with SIGKILL at its n-th step: before or after a statement, before or after a commit,
of the user's transactions and of the outbox's own.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import signal
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy import event
from sqlalchemy.engine import Engine

from keylane.outbox import Outbox, OutboxSettings

SUBJECT = "orders"
KEYS = 5
SETTINGS = OutboxSettings(rescan_ms=50, lease_ms=500, batch_count=3, in_flight_max=3)
ORDERS = (
    "CREATE TABLE IF NOT EXISTS orders (value BLOB PRIMARY KEY, order_key BLOB, number INTEGER)"
)


def user_engine(database: Path) -> Engine:
    """The user's engine; the database is in WAL mode, as with several processes it should be."""
    engine = sa.create_engine(f"sqlite:///{database}", connect_args={"timeout": 30})

    @event.listens_for(engine, "connect")
    def connect(connection: Any, _record: Any) -> None:
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("PRAGMA synchronous=OFF")  # processes are killed, not the machine

    return engine


def kill_at(engine: Engine, step: int) -> None:
    """End this process at its `step`-th step; 0: never."""
    steps = itertools.count(1)

    def count(*_args: Any, **_kwargs: Any) -> None:
        if next(steps) == step:
            os.kill(os.getpid(), signal.SIGKILL)

    for name in ("before_cursor_execute", "after_cursor_execute", "commit", "checkin"):
        event.listen(engine, name, count)


def commit_order(engine: Engine, outbox: Outbox, rng: random.Random) -> None:
    """A business transaction, as short as any: the next order of a key; one of five is rolled
    back.
    """
    with engine.connect() as connection:
        key = b"customer-%d" % rng.randrange(KEYS)
        connection.exec_driver_sql("UPDATE turns SET number = number + 1")  # locks before it reads
        number = connection.exec_driver_sql("SELECT number FROM turns").scalar_one()
        value = b"%s order %d of process %d" % (key, number, os.getpid())
        connection.exec_driver_sql("INSERT INTO orders VALUES (?, ?, ?)", (value, key, number))
        outbox.add_sync(connection, SUBJECT, value, key=key)
        if rng.randrange(5):
            connection.commit()


async def write_and_send(meta: str, database: Path, seed: int, step: int) -> None:
    """Commit orders and send them until the end, which is step `step`."""
    rng = random.Random(seed)
    engine = user_engine(database)
    kill_at(engine, step)
    async with Outbox(meta, engine, settings=SETTINGS) as outbox:
        while True:
            await asyncio.to_thread(commit_order, engine, outbox, rng)
            await asyncio.sleep(rng.choice((0, 0, 0.005, 0.02)))


def run(meta: str, database: str, seed: str, step: str) -> None:
    """The program; for a process that is forked from one that has the imports done."""
    asyncio.run(write_and_send(meta, Path(database), int(seed), int(step)))
