"""The embedded database: transactions that run whole in threads."""

from __future__ import annotations

import asyncio
import threading

import pytest
import sqlalchemy as sa
from sqlalchemy.exc import IntegrityError, OperationalError

from keylane.metaserver.sql.database import READERS, open_database
from keylane.protocol.errors import StorageError
from sim.machines.clock import ManualClock


@pytest.fixture
async def database(tmp_path):
    async with open_database(
        folder=tmp_path, url=None, clock=ManualClock(), boot="b", broker_ttl_ms=1
    ) as opened:
        await opened.write(_make)
        yield opened


def _make(connection):
    connection.execute(sa.text("CREATE TABLE t (a INTEGER PRIMARY KEY, b TEXT)"))


def _fill(connection):
    done = connection.execute(sa.text("INSERT INTO t VALUES (1, 'x'), (2, 'y')"))
    assert done.rowcount == 2
    rows = connection.execute(sa.text("SELECT a, b FROM t ORDER BY a")).mappings().all()
    return [dict(row) for row in rows]


def _empty(connection):
    return connection.execute(sa.text("DELETE FROM t")).rowcount


async def test_transaction_runs_whole_in_another_thread(database):
    """All statements of a work run where the work runs, and the event loop goes on meanwhile."""
    began, end = threading.Event(), threading.Event()

    def work(connection):
        began.set()
        assert end.wait(10)
        return threading.get_ident(), _fill(connection)

    running = asyncio.create_task(database.write(work))
    while not began.is_set():
        await asyncio.sleep(0.001)
    assert not running.done()
    end.set()
    thread, rows = await running
    assert thread != threading.get_ident()
    assert rows == [{"a": 1, "b": "x"}, {"a": 2, "b": "y"}]


async def test_reads_run_at_the_same_time_and_beside_a_write(database):
    """Each of the readers' threads has a connection, and the writer another one."""
    meeting = threading.Barrier(READERS + 1)

    def work(connection):
        meeting.wait(10)
        return connection.execute(sa.text("SELECT count(*) FROM t")).scalar_one()

    answers = await asyncio.gather(
        database.write(work), *(database.read(work) for _ in range(READERS))
    )
    assert answers == [0] * (READERS + 1)


async def test_transaction_is_finished_when_its_caller_is_cancelled(database):
    """The work stays done, and the connection serves the next one."""
    began, end = threading.Event(), threading.Event()

    def work(connection):
        began.set()
        assert end.wait(10)
        _fill(connection)

    calling = asyncio.create_task(database.write(work))
    while not began.is_set():
        await asyncio.sleep(0.001)
    calling.cancel()
    with pytest.raises(asyncio.CancelledError):
        await calling
    end.set()
    assert await database.write(_empty) == 2


async def test_database_refuses_works_when_it_is_closed(database):
    """Those that run are finished first; close waits for them."""
    done = []

    def work(connection):
        _fill(connection)
        done.append(True)

    running = asyncio.create_task(database.write(work))
    await asyncio.sleep(0)
    await database.close()
    assert done == [True]
    await running
    for run in (database.write, database.read):
        with pytest.raises(StorageError, match="ending"):
            await run(_make)


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
    """Statements with many parameter sets and results of many rows."""
    rows = [{"a": number, "b": str(number)} for number in range(1000)]

    def fill(connection):
        connection.execute(sa.text("INSERT INTO t VALUES (:a, :b)"), rows)

    await database.write(fill)
    answers = await database.read(
        lambda connection: connection.execute(sa.text("SELECT a, b FROM t")).all()
    )
    assert [tuple(row) for row in answers] == [(row["a"], row["b"]) for row in rows]
