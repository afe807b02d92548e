"""Real processes for the tests of this folder."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from support.cluster import Cluster
from support.postgres import Postgres, running_postgres
from support.sql.mariadb import Mariadb, running_mariadb


@pytest.fixture(scope="session")
def shared_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A cluster that no test kills; each test makes subjects of its own."""
    with Cluster(tmp_path_factory.mktemp("cluster")) as cluster:
        yield cluster


@pytest.fixture
def cluster(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Cluster]:
    """A cluster of the test's own, to be killed and restarted, with the options of its mark `cluster`."""
    mark = request.node.get_closest_marker("cluster")
    with Cluster(tmp_path, **(mark.kwargs if mark else {})) as cluster:
        yield cluster


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
