"""Real processes for the tests of this folder."""

from collections.abc import Iterator

import pytest

from support.cluster import Cluster
from support.postgres import Postgres, running_postgres


@pytest.fixture(scope="session")
def shared_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A cluster nobody kills; each test makes subjects of its own."""
    cluster = Cluster(tmp_path_factory.mktemp("cluster"))
    try:
        yield cluster
    finally:
        cluster.stop()


@pytest.fixture
def own_cluster(tmp_path) -> Iterator[Cluster]:
    """A cluster of the test's own, to be killed and restarted."""
    cluster = Cluster(tmp_path)
    try:
        yield cluster
    finally:
        cluster.stop()


@pytest.fixture(scope="session")
def postgres() -> Iterator[Postgres]:
    """A PostgreSQL server; each test takes a database of its own."""
    with running_postgres() as server:
        yield server


@pytest.fixture(params=["sqlite", "postgresql"])
def database(request: pytest.FixtureRequest) -> dict[str, str]:
    """The metaserver's settings for its database: the embedded one, then one on the server."""
    if request.param == "sqlite":
        return {}
    return {"database_url": request.getfixturevalue("postgres").url()}
