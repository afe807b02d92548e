"""Tables of an outbox and of effects that processes make at the same moment, as workers of a
deployment do at their start.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import create_async_engine

from keylane import outbox, sink
from keylane.outbox.tables import OutboxTables
from keylane.protocol.errors import StorageError
from keylane.sink.tables import SinkTables
from keylane.user_database import transactions

ROUNDS, MAKERS = 5, 6
KINDS = [(outbox, OutboxTables), (sink, SinkTables)]


@pytest.mark.parametrize("database", ["sqlite", "postgres"])
@pytest.mark.parametrize(("room", "tables_of"), KINDS)
async def test_tables_exist_once_when_processes_make_them_at_once(
    room: Any, tables_of: Any, database: str, request: Any, tmp_path: Path
):
    """Every connection of a maker is its own, so to the database the makers are processes."""
    url = f"sqlite+aiosqlite:///{tmp_path / 'user.db'}"
    if database == "postgres":
        url = request.getfixturevalue(database).url()
    engine = create_async_engine(url)
    for number in range(ROUNDS):
        prefix = f"at_once_{number}"
        tables = tables_of(prefix)
        await asyncio.gather(*(room.create_tables(url, prefix=prefix) for _ in range(MAKERS)))
        rows = sa.select(sa.func.count()).select_from(tables.version_table)
        async with engine.begin() as connection:
            await connection.run_sync(tables.check)
            assert await connection.scalar(rows) == 1
    await engine.dispose()


@pytest.mark.parametrize("room", [outbox, sink])
async def test_tables_are_tried_once_when_the_database_cannot_be_reached(
    room: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.setattr(transactions, "RETRY_PAUSES_S", (600.0,))
    async with asyncio.timeout(30):
        with pytest.raises(StorageError):
            await room.create_tables(f"postgresql+asyncpg://keylane@/none?host={tmp_path}")
