"""Gauges of an outbox: exact where rows are few, and cheap where they are many."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import sqlalchemy as sa

from keylane.outbox import Outbox, OutboxGauges, create_tables, upkeep
from keylane.outbox.tables import FAILED, HALTED, WAITING, OutboxTables
from keylane.outbox.upkeep import read_gauges
from keylane.protocol.errors import Reason
from support.raising import raises

TABLES = OutboxTables()
OPCODES = 100
"""Of SQLite's virtual machine, between two calls of a progress handler."""


@pytest.fixture
def engine(tmp_path) -> Iterator[sa.Engine]:
    engine = sa.create_engine(f"sqlite:///{tmp_path / 'user.db'}")
    with engine.begin() as connection:
        TABLES.create(connection)
    yield engine
    engine.dispose()


def add(engine: sa.Engine, count: int, *, batch_id: int = WAITING, added_at_ns: int = 0) -> None:
    row = {
        "subject": "s",
        "logical": 1,
        "order_key": b"k",
        "value": b"v",
        "properties": b"",
        "batch_id": batch_id,
        "added_at_ns": added_at_ns,
    }
    with engine.begin() as connection:
        connection.execute(sa.insert(TABLES.rows), [row] * count)


def gauges(engine: sa.Engine, *, now_ns: int = 0) -> OutboxGauges:
    with engine.connect() as connection:
        return read_gauges(connection, TABLES, now_ns=now_ns)


def test_gauges_count_rows_of_every_state(engine):
    assert gauges(engine) == OutboxGauges(rows=0, counted=True, failed=0, oldest_age_ms=0)
    for batch_id, count in ((WAITING, 3), (7, 2), (FAILED, 4), (HALTED, 1)):
        add(engine, count, batch_id=batch_id, added_at_ns=batch_id * 1_000_000)
    told = gauges(engine, now_ns=250_000_000)
    assert told == OutboxGauges(rows=10, counted=True, failed=4, oldest_age_ms=250)


def test_gauges_go_by_ids_when_rows_are_many(engine, monkeypatch):
    """Sent rows between them are counted as well: never fewer than there are."""
    monkeypatch.setattr(upkeep, "COUNTED_MAX", 10)
    add(engine, 30)
    with engine.begin() as connection:
        connection.execute(sa.delete(TABLES.rows).where(TABLES.rows.c.id.in_([1, 2, 10, 11])))
    assert gauges(engine) == OutboxGauges(rows=28, counted=False, failed=0, oldest_age_ms=0)


def test_gauges_are_told_when_rows_are_sent_while_they_are_counted(engine, monkeypatch):
    """On PostgreSQL each statement sees what is committed by then."""
    monkeypatch.setattr(upkeep, "COUNTED_MAX", 10)
    add(engine, 30)

    @sa.event.listens_for(engine, "before_cursor_execute")
    def send_all(_connection, cursor, statement, *_args):
        if "max(" in statement:
            cursor.execute("DELETE FROM keylane_outbox")

    assert gauges(engine) == OutboxGauges(rows=11, counted=False, failed=0, oldest_age_ms=0)


def test_gauges_look_at_no_more_when_there_are_more_rows(engine, monkeypatch):
    monkeypatch.setattr(upkeep, "COUNTED_MAX", 100)

    def opcodes() -> int:
        calls = 0

        def count() -> int:
            nonlocal calls
            calls += 1
            return 0

        with engine.connect() as connection:
            raw = connection.connection.driver_connection
            assert raw is not None
            raw.set_progress_handler(count, OPCODES)
            read_gauges(connection, TABLES, now_ns=0)
            raw.set_progress_handler(None, 0)
        return calls * OPCODES

    add(engine, 500, batch_id=FAILED)
    add(engine, 500)
    few = opcodes()
    add(engine, 10_000, batch_id=FAILED)
    add(engine, 10_000)
    assert 0 < opcodes() <= few + OPCODES


@pytest.mark.parametrize("driver", ["sqlite", "sqlite+aiosqlite"])
async def test_gauges_need_no_opened_outbox(tmp_path, driver):
    """Nor one that is closed: no connection stays behind."""
    url = f"{driver}:///{tmp_path / 'user.db'}"
    outbox = Outbox("127.0.0.1:1", url)
    with raises(Reason.OUTBOX_MISSING):
        await outbox.gauges()
    await create_tables(url)
    assert (await outbox.gauges()).rows == 0
    assert (await outbox.status()).subjects == ()
    held = [os.path.realpath(f"/proc/self/fd/{number}") for number in os.listdir("/proc/self/fd")]
    assert str(tmp_path / "user.db") not in held
