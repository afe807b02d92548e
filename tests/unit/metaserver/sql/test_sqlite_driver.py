"""The few hops of the embedded database's connections."""

from __future__ import annotations

import pytest
import sqlalchemy as sa
from sqlalchemy.exc import IntegrityError, OperationalError

from keylane.metaserver.sql.database import open_database
from keylane.metaserver.sql.sqlite_driver import FewHopsConnection
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
    real = FewHopsConnection._execute

    async def counted(self, function, *args, **kwargs):
        seen.append(function)
        return await real(self, function, *args, **kwargs)

    monkeypatch.setattr(FewHopsConnection, "_execute", counted)
    return seen


def _make(connection):
    connection.execute(sa.text("CREATE TABLE t (a INTEGER PRIMARY KEY, b TEXT)"))


def _fill(connection):
    done = connection.execute(sa.text("INSERT INTO t VALUES (1, 'x'), (2, 'y')"))
    assert done.rowcount == 2
    rows = connection.execute(sa.text("SELECT a, b FROM t ORDER BY a")).mappings().all()
    return [dict(row) for row in rows]


async def test_statement_takes_one_hop(database, hops):
    """Two statements in a transaction: begin, both, commit, and no further hop."""
    assert await database.write(_fill) == [{"a": 1, "b": "x"}, {"a": 2, "b": "y"}]
    assert len(hops) == 4


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
    """Statements with many parameter sets and results of many rows take one hop too."""
    rows = [{"a": number, "b": str(number)} for number in range(1000)]

    def fill(connection):
        connection.execute(sa.text("INSERT INTO t VALUES (:a, :b)"), rows)

    await database.write(fill)
    answers = await database.read(
        lambda connection: connection.execute(sa.text("SELECT a, b FROM t")).all()
    )
    assert [tuple(row) for row in answers] == [(row["a"], row["b"]) for row in rows]
