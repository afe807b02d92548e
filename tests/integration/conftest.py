"""Real database servers for the tests of this folder."""

from collections.abc import Iterator

import pytest

from support.postgres import Postgres, running_postgres
from support.sql.mariadb import Mariadb, running_mariadb


@pytest.fixture(scope="session")
def postgres() -> Iterator[Postgres]:
    """A PostgreSQL server; each test takes a database of its own."""
    with running_postgres() as server:
        yield server


@pytest.fixture(scope="session")
def mariadb() -> Iterator[Mariadb]:
    """A MariaDB server; each test takes a database of its own."""
    with running_mariadb() as server:
        yield server


@pytest.fixture(params=["sqlite", "postgresql"])
def database(request: pytest.FixtureRequest) -> dict[str, str]:
    """The metaserver's settings for its database: the embedded one, then one on the server."""
    if request.param == "sqlite":
        return {}
    return {"database_url": request.getfixturevalue("postgres").url()}
