"""Users' databases with the tables of an outbox."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from keylane.outbox import create_tables


def database_url(request: pytest.FixtureRequest, name: str, folder: Path) -> str:
    """The address of a new database."""
    if name == "sqlite":
        return f"sqlite+aiosqlite:///{folder / 'user.db'}"
    return request.getfixturevalue(name).url()


# MariaDB comes from Debian, not from the lock: `make proof` and `pytest --whole` have it.
@pytest.fixture(params=["sqlite", "postgres", pytest.param("mariadb", marks=pytest.mark.whole)])
async def engine(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[AsyncEngine]:
    """An async engine of a user, on each kind of database."""
    engine = create_async_engine(database_url(request, request.param, tmp_path))
    await create_tables(engine)
    yield engine
    await engine.dispose()


@pytest.fixture
async def sqlite(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[AsyncEngine]:
    """An async engine of a user, on SQLite."""
    engine = create_async_engine(database_url(request, "sqlite", tmp_path))
    await create_tables(engine)
    yield engine
    await engine.dispose()
