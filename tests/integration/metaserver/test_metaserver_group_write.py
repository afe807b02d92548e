"""Works that wait for SQLite's one writer share a transaction, isolated from each other."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import sqlalchemy as sa

from keylane.metaserver.sql.database import SqlDatabase, open_database
from keylane.metaserver.sql.schema import facts
from keylane.protocol.clock import SystemClock
from keylane.protocol.errors import StorageError, SubjectUnknownError


@pytest.fixture
async def database(tmp_path: Path) -> AsyncIterator[SqlDatabase]:
    async with open_database(
        folder=tmp_path, url=None, clock=SystemClock(), boot="b", broker_ttl_ms=1_000
    ) as opened:
        yield opened


def store(connection: sa.Connection, name: str, *, fault: Exception | None = None) -> str:
    """Store a fact, then fail if told to."""
    connection.execute(sa.insert(facts).values(name=name, value=name))
    if fault is not None:
        raise fault
    return name


def stored(connection: sa.Connection) -> set[str]:
    return set(connection.execute(sa.select(facts.c.name)).scalars()) - {
        "boot",
        "cluster id",
        "cluster version",
        "oldest reader of the schema",
    }


async def test_work_gets_its_own_answer(database: SqlDatabase) -> None:
    """A thousand works, durable or not, are all done."""
    works = [database.write, database.renew]
    names = [f"fact-{index}" for index in range(1000)]
    answers = await asyncio.gather(
        *(works[index % 2](store, name) for index, name in enumerate(names))
    )
    assert answers == names
    assert await database.read(stored) == set(names)


async def test_waiting_works_share_a_transaction(
    database: SqlDatabase, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Works that come during a transaction go into the next one together, while it has time for
    them.
    """
    monkeypatch.setattr(database._writer, "_boot_ms", lambda: 0)  # type: ignore[union-attr]
    commits = 0

    def count(_connection: object) -> None:
        nonlocal commits
        commits += 1

    sa.event.listen(database._write.engine, "commit", count)  # type: ignore[union-attr]
    await asyncio.gather(*(database.write(store, f"fact-{index}") for index in range(100)))
    assert commits <= 3


async def test_failed_work_does_not_affect_others(database: SqlDatabase) -> None:
    """A KeylaneError, or a bug, undoes its own work only."""
    answers = await asyncio.gather(
        database.write(store, "a"),
        database.write(store, "b", fault=SubjectUnknownError(subject="b")),
        database.write(store, "c", fault=ZeroDivisionError("ours")),
        database.write(store, "d"),
        return_exceptions=True,
    )
    assert [type(answer) for answer in answers] == [
        str,
        SubjectUnknownError,
        ZeroDivisionError,
        str,
    ]
    assert await database.read(stored) == {"a", "d"}
    with pytest.raises(SubjectUnknownError):
        await database.write(store, "e", fault=SubjectUnknownError(subject="e"))
    assert await database.read(stored) == {"a", "d"}


async def test_failed_statement_does_not_affect_other_works(database: SqlDatabase) -> None:
    """When the database refuses one work, the others of its transaction are done alone."""
    answers = await asyncio.gather(
        database.write(store, "a"),
        database.write(store, "b"),
        database.write(store, "a"),
        database.write(store, "c"),
        return_exceptions=True,
    )
    assert [type(answer) for answer in answers] == [str, str, StorageError, str]
    assert await database.read(stored) == {"a", "b", "c"}


async def test_cancelled_work_is_not_done(database: SqlDatabase) -> None:
    """A caller that is gone before its work began leaves no trace; the others are served."""
    tasks = [asyncio.create_task(database.write(store, f"fact-{index}")) for index in range(3)]
    await asyncio.sleep(0)
    tasks[1].cancel()
    answers = await asyncio.gather(*tasks, return_exceptions=True)
    assert isinstance(answers[1], asyncio.CancelledError)
    assert await database.read(stored) == {"fact-0", "fact-2"}


async def test_close_waits_for_submitted_works(tmp_path: Path) -> None:
    """Works that were submitted are answered before the database closes."""
    options = {"url": None, "clock": SystemClock(), "boot": "b", "broker_ttl_ms": 1_000}
    async with open_database(folder=tmp_path, **options) as database:  # type: ignore[arg-type]
        tasks = [asyncio.create_task(database.write(store, f"fact-{i}")) for i in range(300)]
        await asyncio.sleep(0)
    assert len(await asyncio.gather(*tasks)) == 300


def slowly(_connection: sa.Connection, done: list[str], name: str) -> None:
    """A work that takes long, as settling a large group does."""
    time.sleep(0.02)
    done.append(name)


async def test_urgent_works_go_before_waiting_ones(database: SqlDatabase) -> None:
    """Behind hundreds of slow works a renewal waits for one short transaction; the works keep their
    order.
    """
    done: list[str] = []
    count = 200
    works = [
        asyncio.create_task(database.write(slowly, done, f"{index}")) for index in range(count)
    ]
    await asyncio.sleep(0.05)
    for index in range(5):
        before = len(done)
        await database.renew(slowly, done, f"renewal-{index}")
        await database.write_urgent(slowly, done, f"report-{index}")
        assert len(done) - before < count / 4, (
            "behind a transaction or two, not behind all that waits"
        )
    others = [name for name in done if name.isdigit()]
    assert len(others) < count
    await asyncio.gather(*works)
    assert [name for name in done if name.isdigit()] == [f"{index}" for index in range(count)]


async def test_endless_renewals_do_not_starve_other_works(database: SqlDatabase) -> None:
    """Each transaction does one of the other works too."""
    done: list[str] = []
    stop = asyncio.Event()

    async def renew() -> None:
        while not stop.is_set():
            await database.renew(slowly, done, "renewal")

    renewing = [asyncio.create_task(renew()) for _ in range(10)]
    await asyncio.sleep(0.1)
    await asyncio.gather(*(database.write(store, f"fact-{index}") for index in range(20)))
    stop.set()
    await asyncio.gather(*renewing)
    assert len(await database.read(stored)) == 20
