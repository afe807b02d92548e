"""Callers that have gone: their reads are taken back, their errors dropped, and renewals have
connections of their own.
"""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from keylane.metaserver.sql.database import SqlDatabase, open_database
from keylane.metaserver.sql.postgres import CONNECTIONS
from keylane.protocol.clock import SystemClock
from keylane.protocol.errors import StorageError
from support.postgres import Postgres

SOON_S = 4.0
"""Well below the time of what stands in the way, and enough on a busy machine."""


@pytest.fixture
async def database(postgres: Postgres, tmp_path: Path) -> AsyncIterator[SqlDatabase]:
    opening = open_database(
        folder=tmp_path, url=postgres.url(), clock=SystemClock(), boot="", broker_ttl_ms=10_000
    )
    async with opening as opened:
        yield opened


def sleep(connection: sa.Connection, seconds: float) -> None:
    connection.execute(sa.select(sa.func.pg_sleep(seconds)))


def one(connection: sa.Connection) -> int:
    return connection.execute(sa.select(sa.literal(1))).scalar_one()


def sleep_and_fail(connection: sa.Connection, seconds: float) -> None:
    sleep(connection, seconds)
    raise StorageError("failed when nobody waited any more")


async def begun(tasks: list[asyncio.Task[Any]]) -> None:
    """Wait until the tasks have connections, or wait for one."""
    await asyncio.sleep(1)
    assert not any(task.done() for task in tasks)


async def test_read_is_taken_back_when_its_caller_has_gone(database: SqlDatabase) -> None:
    reads = [asyncio.create_task(database.read(sleep, 9)) for _ in range(3 * CONNECTIONS)]
    await begun(reads)
    for read in reads:
        read.cancel()
    await asyncio.wait(reads)
    asked_s = time.monotonic()
    assert await database.read(one) == 1
    assert time.monotonic() - asked_s < SOON_S


async def test_renewal_is_not_kept_waiting_by_other_calls(database: SqlDatabase) -> None:
    others = [
        asyncio.create_task(call(sleep, 9))
        for call in (database.read, database.write, database.write_urgent)
        for _ in range(CONNECTIONS)
    ]
    await begun(others)
    asked_s = time.monotonic()
    assert await database.renew(one) == 1
    assert time.monotonic() - asked_s < SOON_S
    for other in others:
        other.cancel()
    await asyncio.wait(others)


async def test_error_of_a_call_whose_caller_has_gone_is_dropped(database: SqlDatabase) -> None:
    """The event loop would log it: `Task exception was never retrieved`."""
    reported: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(
        lambda _loop, context: reported.append(context)
    )
    for call in (database.read, database.write, database.write_urgent, database.renew):
        task = asyncio.create_task(partial(call, sleep_and_fail, 0.3)())
        await asyncio.sleep(0.1)
        task.cancel()
        await asyncio.wait([task])
    await asyncio.sleep(1)
    gc.collect()
    await asyncio.sleep(0)
    assert reported == []


async def test_write_goes_on_when_its_caller_has_gone(database: SqlDatabase) -> None:
    def write(connection: sa.Connection) -> None:
        sleep(connection, 0.7)
        connection.execute(sa.text("INSERT INTO facts (name, value) VALUES ('went on', 'yes')"))

    def stored(connection: sa.Connection) -> str | None:
        return connection.execute(
            sa.text("SELECT value FROM facts WHERE name = 'went on'")
        ).scalar_one_or_none()

    task = asyncio.create_task(database.write(write))
    await asyncio.sleep(0.2)
    task.cancel()
    await asyncio.wait([task])
    async with asyncio.timeout(60):
        while await database.read(stored) != "yes":
            await asyncio.sleep(0.05)
