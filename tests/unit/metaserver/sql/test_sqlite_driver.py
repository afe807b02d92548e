"""Transactions on SQLite take few hops between threads."""

from __future__ import annotations

import asyncio
import itertools
import sqlite3
import threading
from functools import partial
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.exc import IntegrityError, OperationalError

from keylane.metaserver.sql.database import open_database
from keylane.metaserver.sql.sqlite_driver import ThreadedConnection
from keylane.protocol.errors import StorageError
from sim.machines.clock import ManualClock


@pytest.fixture
async def database(tmp_path):
    async with open_database(
        folder=tmp_path, url=None, clock=ManualClock(), boot="b", broker_ttl_ms=1
    ) as opened:
        await opened.write(_make)
        yield opened


@pytest.fixture
def hops(monkeypatch):
    """Counts the hops to a connection's thread."""
    seen = []
    real = ThreadedConnection._execute

    async def counted(self, function, *args, **kwargs):
        seen.append(function)
        return await real(self, function, *args, **kwargs)

    monkeypatch.setattr(ThreadedConnection, "_execute", counted)
    return seen


def _make(connection):
    connection.execute(sa.text("CREATE TABLE t (a INTEGER PRIMARY KEY, b TEXT)"))


def _fill(connection):
    done = connection.execute(sa.text("INSERT INTO t VALUES (1, 'x'), (2, 'y')"))
    assert done.rowcount == 2
    rows = connection.execute(sa.text("SELECT a, b FROM t ORDER BY a")).mappings().all()
    return [dict(row) for row in rows]


async def test_transaction_takes_one_hop(database, hops):
    """Begin, two statements and commit."""
    assert await database.write(_fill) == [{"a": 1, "b": "x"}, {"a": 2, "b": "y"}]
    assert len(hops) == 1


async def test_failed_transaction_is_rolled_back(database):
    """Its error is SQLite's own, and the connection serves the next transaction."""

    def fail(connection):
        _fill(connection)
        connection.execute(sa.text("INSERT INTO t VALUES (1, 'again')"))

    def misspelt(connection):
        connection.execute(sa.text("SELECT * FROM nothing"))

    for work, error in ((fail, IntegrityError), (misspelt, OperationalError)):
        with pytest.raises(StorageError) as caught:
            await database.write(work)
        assert isinstance(caught.value.__cause__, error)
    assert len(await database.write(_fill)) == 2


async def test_statement_takes_many_rows(database):
    """Statements with many parameter sets and results of many rows are whole."""
    rows = [{"a": number, "b": str(number)} for number in range(1000)]

    def fill(connection):
        connection.execute(sa.text("INSERT INTO t VALUES (:a, :b)"), rows)

    await database.write(fill)
    answers = await database.read(
        lambda connection: connection.execute(sa.text("SELECT a, b FROM t")).all()
    )
    assert [tuple(row) for row in answers] == [(row["a"], row["b"]) for row in rows]


async def test_transaction_is_done_when_its_caller_is_cancelled(database):
    """The thread ends what it has begun, and serves the next transaction."""
    began, go_on = threading.Event(), threading.Event()

    def slow(connection):
        began.set()
        assert go_on.wait(10)
        connection.execute(sa.text("INSERT INTO t VALUES (7, 'late')"))

    caller = asyncio.create_task(database.write(slow))
    await asyncio.to_thread(began.wait, 10)
    caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller
    go_on.set()
    answers = database.write(
        lambda connection: connection.execute(sa.text("SELECT b FROM t")).all()
    )
    assert [tuple(row) for row in await answers] == [("late",)]


async def test_long_reading_is_interrupted_when_the_database_closes(tmp_path, monkeypatch):
    """Its caller gets an error; nothing waits for its end."""
    monkeypatch.setattr("keylane.metaserver.sql.sqlite_driver.CLOSE_S", 0.05)
    endless = (
        "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT count(*) FROM n"
    )
    async with open_database(
        folder=tmp_path, url=None, clock=ManualClock(), boot="b", broker_ttl_ms=1
    ) as opened:
        reading = asyncio.create_task(
            opened.read(lambda connection: connection.execute(sa.text(endless)).all())
        )
        await asyncio.sleep(0.05)
    with pytest.raises(StorageError, match="interrupted"):
        await reading
    with pytest.raises(StorageError, match="shutting down"):
        await opened.read(_make)


async def test_reader_that_works_long_keeps_no_other_waiting(database):
    """A short reading goes to the connection that has less to do."""
    began, go_on = threading.Event(), threading.Event()

    def slow(_connection):
        began.set()
        return go_on.wait(10)

    reading = asyncio.create_task(database.read(slow))
    await asyncio.to_thread(began.wait, 10)
    for _ in range(3):
        async with asyncio.timeout(5):
            await database.read(lambda connection: connection.execute(sa.text("SELECT 1")).all())
    go_on.set()
    assert await reading


async def test_statement_is_compiled_once_when_transactions_repeat_it(database):
    """Transactions share compiled statements, whatever the lengths of their lists."""
    table = sa.table("t", sa.column("a", sa.Integer))
    contexts = []

    def look(connection, wanted):
        some = sa.select(table.c.a).where(table.c.a.in_(wanted))
        answer = connection.execute(some)
        contexts.append(answer.context.compiled)
        return answer.scalars().all()

    await database.write(_fill)
    assert [await database.write(look, ids) for ids in ([1], [1, 2], [])] == [[1], [1, 2], []]
    assert len({id(compiled) for compiled in contexts}) == 1


@pytest.mark.parametrize("turns", [1, 2, 3])
async def test_connection_is_closed_when_its_first_caller_leaves(tmp_path, monkeypatch, turns):
    """It is one of several readers' connections, and is still being opened then."""
    left: set[int] = set()
    numbers = itertools.count()

    class Counted(sqlite3.Connection):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            self.number = next(numbers)
            left.add(self.number)

        def close(self) -> None:
            super().close()
            left.discard(self.number)

    monkeypatch.setattr(sqlite3, "connect", partial(sqlite3.connect, factory=Counted))
    async with open_database(
        folder=tmp_path, url=None, clock=ManualClock(), boot="b", broker_ttl_ms=1
    ) as opened:
        known = len(left)
        calls = [asyncio.ensure_future(opened.read(lambda _connection: None)) for _ in range(8)]
        for _ in range(turns):
            await asyncio.sleep(0)
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
    assert next(numbers) > known, "a connection was being opened"
    assert left == set()
