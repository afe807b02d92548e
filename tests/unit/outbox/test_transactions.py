"""Rows in transactions of a user on SQLite: there if the transaction commits, gone if it does
not.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from keylane.outbox import Outbox, create_tables
from keylane.outbox.tables import OutboxTables
from keylane.protocol.errors import InvalidRequestError

TABLES = OutboxTables()
META = "127.0.0.1:1"
AUTOCOMMIT: list[dict[str, Any]] = [
    {"isolation_level": "AUTOCOMMIT"},
    {"connect_args": {"isolation_level": None}},
]
if sys.version_info >= (3, 12):
    AUTOCOMMIT.append({"connect_args": {"autocommit": True}})


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path / 'user.db'}"


@pytest.fixture
def engine(url: str) -> Iterator[sa.Engine]:
    engine = sa.create_engine(url)
    with engine.begin() as connection:
        TABLES.create(connection)
    yield engine
    engine.dispose()


def values(engine: sa.Engine) -> list[bytes]:
    with engine.connect() as connection:
        return list(connection.execute(sa.select(TABLES.rows.c.value)).scalars())


@pytest.mark.parametrize("opened", [Session, sa.Engine.connect])
@pytest.mark.parametrize("depth", [1, 2])
def test_row_is_gone_when_its_savepoint_came_first_and_the_transaction_rolls_back(
    engine: sa.Engine, opened: Any, depth: int
) -> None:
    """The end of the savepoint was a commit, and the row was sent."""
    outbox: Outbox[bytes] = Outbox(META, engine)

    def added(target: Any, level: int = depth) -> None:
        with target.begin_nested():
            if level > 1:
                added(target, level - 1)
            else:
                outbox.add_sync(target, "orders", b"v")

    with opened(engine) as target:
        added(target)
        target.rollback()
        assert values(engine) == []
        with target.begin_nested() as undone:
            outbox.add_sync(target, "orders", b"undone")
            undone.rollback()
        outbox.add_sync(target, "orders", b"behind it")
        target.rollback()
        assert values(engine) == []
        added(target)
        added(target)
        target.commit()
    assert values(engine) == [b"v", b"v"]


def test_row_is_gone_when_the_connection_that_its_session_joined_rolls_back(
    engine: sa.Engine,
) -> None:
    outbox: Outbox[bytes] = Outbox(META, engine)
    with engine.connect() as connection, connection.begin() as transaction:
        with Session(connection, join_transaction_mode="create_savepoint") as session:
            outbox.add_sync(session, "orders", b"v")
            session.commit()
            outbox.add_sync(session, "orders", b"w")
            session.commit()
        transaction.rollback()
    assert values(engine) == []


@pytest.mark.parametrize("kind", [AsyncSession, AsyncConnection])
async def test_row_is_gone_when_its_savepoint_came_first_in_an_async_transaction(
    engine: sa.Engine, kind: type
) -> None:
    own = create_async_engine(engine.url.set(drivername="sqlite+aiosqlite"))
    outbox: Outbox[bytes] = Outbox(META, own)
    async with AsyncSession(own) if kind is AsyncSession else own.connect() as target:
        for value, end in ((b"undone", target.rollback), (b"kept", target.commit)):
            async with target.begin_nested():
                await outbox.add(target, "orders", value)
            await end()
    await own.dispose()
    assert values(engine) == [b"kept"]


@pytest.mark.parametrize("options", AUTOCOMMIT)
def test_row_is_refused_when_the_connection_has_autocommit(
    engine: sa.Engine, options: dict[str, Any]
) -> None:
    """It was there at once, whatever became of the transaction."""
    own = sa.create_engine(engine.url, **options)
    outbox: Outbox[bytes] = Outbox(META, engine)
    for opened in (Session, sa.Engine.begin):
        with opened(own) as target, pytest.raises(InvalidRequestError, match="AUTOCOMMIT"):
            outbox.add_sync(target, "orders", b"v")
    with Session(own) as session:
        with pytest.raises(InvalidRequestError, match="AUTOCOMMIT"):
            outbox.add_sync(session, "orders", b"v")
    own.dispose()
    assert values(engine) == []


@pytest.mark.parametrize("options", AUTOCOMMIT)
async def test_row_is_refused_when_the_async_connection_has_autocommit(
    engine: sa.Engine, options: dict[str, Any]
) -> None:
    own = create_async_engine(engine.url.set(drivername="sqlite+aiosqlite"), **options)
    outbox: Outbox[bytes] = Outbox(META, own)
    async with AsyncSession(own) as session, own.connect() as connection:
        for target in (session, connection):
            with pytest.raises(InvalidRequestError, match="AUTOCOMMIT"):
                await outbox.add(target, "orders", b"v")
    await own.dispose()
    assert values(engine) == []


@pytest.mark.parametrize("options", AUTOCOMMIT)
async def test_outbox_is_refused_when_its_own_engine_has_autocommit(
    engine: sa.Engine, options: dict[str, Any]
) -> None:
    """What it sends it notes in transactions of its own."""
    own = sa.create_engine(engine.url, **options)
    with pytest.raises(InvalidRequestError, match="AUTOCOMMIT"):
        await Outbox(META, own).__aenter__()
    with pytest.raises(InvalidRequestError, match="AUTOCOMMIT"):
        await create_tables(own)
    own.dispose()
