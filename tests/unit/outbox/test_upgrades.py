"""Older tables of an outbox are upgraded step by step, and no step is passed over."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import sqlalchemy as sa
from sqlalchemy.engine import Connection

from keylane.outbox import Outbox, tables, upgrades
from keylane.outbox.tables import OutboxTables
from keylane.outbox.upgrades import upgrade
from keylane.protocol.errors import OutboxOlderError

TABLES = OutboxTables("shop")


def add_origin(connection: Connection, prefix: str) -> None:
    connection.execute(sa.text(f"ALTER TABLE {prefix} ADD COLUMN origin VARCHAR(20)"))


def fill_origin(connection: Connection, prefix: str) -> None:
    connection.execute(sa.text(f"UPDATE {prefix} SET origin = 'before'"))


STEPS = {1: add_origin, 2: fill_origin}


@pytest.fixture
def engine(tmp_path) -> Iterator[sa.Engine]:
    """A database with an outbox of version 1, in which a row waits."""
    engine = sa.create_engine(f"sqlite:///{tmp_path / 'user.db'}")
    with engine.begin() as connection:
        TABLES.create(connection)
        Outbox("127.0.0.1:1", engine, prefix="shop").add_sync(connection, "s", b"v", key=b"k")
    yield engine
    engine.dispose()


def state(engine: sa.Engine) -> tuple[int, int]:
    """The version of the tables, and the token of the lease."""
    lease = TABLES.lease.c
    with engine.connect() as connection:
        version, token = connection.execute(sa.select(lease.version, lease.token)).one()
    return version, token


def test_tables_are_upgraded_step_by_step_with_their_rows(engine):
    for _ in range(2):
        with engine.begin() as connection:
            upgrade(connection, TABLES.lease, prefix="shop", wanted=3, steps=STEPS)
        assert state(engine) == (3, 1), "a second upgrade does nothing, and disturbs no sender"
    with engine.connect() as connection:
        assert connection.execute(sa.text("SELECT value, origin FROM shop")).all() == [
            (b"v", "before")
        ]


def test_tables_are_upgraded_when_they_are_created_again(engine, monkeypatch):
    """As a program does at its start, or a migration."""
    monkeypatch.setattr(tables, "VERSION", 3)
    monkeypatch.setattr(upgrades, "STEPS", STEPS)
    with engine.begin() as connection:
        TABLES.create(connection)
    assert state(engine) == (3, 1)


def test_upgrade_goes_on_where_it_broke_off(engine):
    def fail(_connection: Connection, _prefix: str) -> None:
        raise OSError("the power is gone")

    with engine.connect() as connection, pytest.raises(OSError, match="power"):
        upgrade(connection, TABLES.lease, prefix="shop", wanted=3, steps={1: add_origin, 2: fail})
    with engine.begin() as connection:
        upgrade(connection, TABLES.lease, prefix="shop", wanted=2, steps=STEPS)
    assert state(engine)[0] == 2
    with engine.begin() as connection:
        upgrade(connection, TABLES.lease, prefix="shop", wanted=3, steps=STEPS)
    assert state(engine)[0] == 3


def test_tables_are_refused_when_a_step_is_missing(engine, monkeypatch):
    monkeypatch.setattr(tables, "VERSION", 3)
    monkeypatch.setattr(upgrades, "STEPS", {2: fill_origin})
    with engine.begin() as connection, pytest.raises(OutboxOlderError) as refused:
        TABLES.create(connection)
    assert (refused.value.version, refused.value.wanted) == (1, 3)
    assert state(engine) == (1, 0)
