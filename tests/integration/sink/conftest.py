"""Users' databases with the tables of fenced effects, and a table of entries."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from keylane.sink import create_tables
from support.sink.entries import ENTRIES


# MariaDB comes from Debian, not from the lock: `make proof` and `pytest --whole` have it.
@pytest.fixture(params=["postgres", pytest.param("mariadb", marks=pytest.mark.whole)])
async def engine(request: pytest.FixtureRequest) -> AsyncIterator[AsyncEngine]:
    """An async engine of a user, on each kind of database server."""
    engine = create_async_engine(request.getfixturevalue(request.param).url())
    await create_tables(engine)
    async with engine.begin() as connection:
        await connection.run_sync(ENTRIES.create)
    yield engine
    await engine.dispose()


@pytest.fixture
async def postgres_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The address of a user's database on PostgreSQL."""
    url: str = request.getfixturevalue("postgres").url()
    await create_tables(url)
    engine = create_async_engine(url)
    async with engine.begin() as connection:
        await connection.run_sync(ENTRIES.create)
    await engine.dispose()
    return url
