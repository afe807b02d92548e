"""Tables of fenced effects that processes make at the same moment, as workers of a deployment do at their start."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import create_async_engine

from keylane.protocol.errors import StorageError
from keylane.sink import create_tables
from keylane.sink.tables import SinkTables

ROUNDS, MAKERS = 5, 6


@pytest.mark.parametrize("database", ["sqlite", "postgres"])
async def test_tables_exist_once_when_processes_make_them_at_once(
    database: str, request: pytest.FixtureRequest, tmp_path: Path
):
    """Every connection of a maker is its own, so to the database the makers are processes."""
    url = f"sqlite+aiosqlite:///{tmp_path / 'user.db'}"
    if database == "postgres":
        url = request.getfixturevalue(database).url()
    for number in range(ROUNDS):
        prefix = f"at_once_{number}"
        await asyncio.gather(*(create_tables(url, prefix=prefix) for _ in range(MAKERS)))
        engine = create_async_engine(url)
        async with engine.begin() as connection:
            await connection.run_sync(SinkTables(prefix).check)
            versions = sa.select(sa.func.count()).select_from(SinkTables(prefix).version)
            assert await connection.scalar(versions) == 1
        await engine.dispose()


async def test_tables_are_tried_once_when_the_database_cannot_be_reached(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.setattr("keylane.sink.admin.AGAIN_AFTER_S", (600.0,))
    url = f"postgresql+asyncpg://keylane@/none?host={tmp_path}"
    async with asyncio.timeout(30):
        with pytest.raises(StorageError):
            await create_tables(url)
