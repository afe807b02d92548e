"""A database that went back behind the brokers: metaservers notice, say what to do, and create
nothing until it is mended.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest

from integration.hosts.test_operating import get, samples_of
from keylane.protocol import endpoints
from keylane.protocol.control import CreateSubject
from keylane.protocol.errors import Reason, UnavailableError
from keylane.protocol.groups import CreateGroup
from keylane.protocol.operations import OperationKind, Reshape
from keylane.rpc.client import MetaClient
from keylane.rpc.http_network import HttpNetwork
from support.cluster import Cluster, eventually
from support.lost_database import rebuild_lost_database
from support.postgres import Postgres
from support.raising import raises
from support.server_process import run_keylane

BEHIND = ("keylane_metaserver_database_behind", ())


class OlderFile:
    """SQLite: an older copy of the file is put in the place of the newer one, and the metaserver
    started on it.
    """

    settings = ""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "meta-0" / "meta.db"
        self._copy = folder / "older.db"

    def remember(self) -> None:
        _copy(self._file, self._copy)

    def go_back(self, cluster: Cluster) -> None:
        cluster.meta_program.kill()
        for file in self._file.parent.glob("meta.db*"):
            file.unlink()
        _copy(self._copy, self._file)
        cluster.meta_program.restart()


class Standby:
    """PostgreSQL: another database takes the place of the first, as after a fail-over; the
    metaserver goes on.
    """

    def __init__(self, postgres: Postgres) -> None:
        self._postgres = postgres
        url = postgres.url()
        self._name = url.split("?")[0].rsplit("/", 1)[1]
        self.settings = f'database_url = "{url}"'

    def remember(self) -> None:
        self._closed(f"CREATE DATABASE {self._name}_standby TEMPLATE {self._name}")

    def go_back(self, _cluster: Cluster) -> None:
        self._closed(
            f"ALTER DATABASE {self._name} RENAME TO {self._name}_gone",
            f"ALTER DATABASE {self._name}_standby RENAME TO {self._name}",
        )

    def _closed(self, *statements: str) -> None:
        """Run statements while no metaserver is connected."""
        here = f"WHERE datname = '{self._name}'"
        self._postgres.execute(f"ALTER DATABASE {self._name} ALLOW_CONNECTIONS false")
        self._postgres.execute(
            f"SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity {here}"
        )
        for statement in statements:
            self._postgres.execute(statement)
        for name in (self._name, f"{self._name}_standby"):
            with contextlib.suppress(Exception):
                self._postgres.execute(f"ALTER DATABASE {name} ALLOW_CONNECTIONS true")


def _copy(source: Path, target: Path) -> None:
    with (
        contextlib.closing(sqlite3.connect(source)) as old,
        contextlib.closing(sqlite3.connect(target)) as new,
    ):
        old.backup(new)


@pytest.fixture(params=["sqlite", "postgresql"])
def database(request: pytest.FixtureRequest, tmp_path: Path) -> OlderFile | Standby:
    if request.param == "sqlite":
        return OlderFile(tmp_path)
    return Standby(request.getfixturevalue("postgres"))


@pytest.fixture
def running(database: OlderFile | Standby, tmp_path: Path) -> Iterator[Cluster]:
    with Cluster(tmp_path, 2, meta_settings=database.settings) as cluster:
        yield cluster


async def behind(cluster: Cluster, value: float) -> None:
    """Wait until the metric says so."""
    await eventually(
        lambda: samples_of(cluster.meta).get(BEHIND) == value, seconds=60, what=f"behind: {value:g}"
    )


@pytest.mark.crash
async def test_metaserver_creates_nothing_and_says_why_when_the_database_lost_a_resize(
    running: Cluster, database: OlderFile | Standby
) -> None:
    async with contextlib.AsyncExitStack() as stack:
        network = HttpNetwork()
        stack.push_async_callback(network.close)
        meta = MetaClient(network, [running.meta])
        await running.create("orders", partitions=2)
        database.remember()
        await eventually(lambda: get(running.meta, "/health/ready")[0] == 200, seconds=60)
        await running.reshape(Reshape(kind=OperationKind.RESIZE, subject="orders", partitions=4))
        database.go_back(running)
        dry_run = Reshape(kind=OperationKind.RESIZE, subject="orders", partitions=3, dry_run=True)

        async def refused() -> UnavailableError:
            while True:
                try:
                    await meta.call(endpoints.RESHAPE, dry_run)
                except UnavailableError as error:
                    return error
                await asyncio.sleep(0.1)

        error = await asyncio.wait_for(refused(), 60)
        assert "is older than" in error.message
        assert "keylane meta rebuild" in error.hint
        await behind(running, 1)
        for call in (
            lambda: meta.create_subject(CreateSubject(subject="new", partitions=1)),
            lambda: meta.call(endpoints.CREATE_GROUP, CreateGroup(), subject="orders", group="g"),
            lambda: meta.call(
                endpoints.RESHAPE,
                Reshape(kind=OperationKind.RESIZE, subject="orders", partitions=3),
            ),
        ):
            with raises(Reason.DATABASE_BEHIND, match="is older than"):
                await call()
        status, body = get(running.meta, "/health/ready")
        assert status == 503
        assert "keylane meta rebuild" in json.loads(body)["reason"]
        checked = await asyncio.to_thread(run_keylane, "cluster", "check", "--meta", running.meta)
        assert checked.returncode == 1
        assert "is older than" in checked.stdout
        assert "keylane meta rebuild" in checked.stdout


@pytest.mark.crash
async def test_metaserver_is_ready_when_the_database_was_rebuilt(tmp_path: Path) -> None:
    older = OlderFile(tmp_path)
    with Cluster(tmp_path, 2) as cluster:
        await cluster.create("orders", partitions=2)
        older.remember()
        await cluster.create("lost", partitions=2)
        older.go_back(cluster)
        await behind(cluster, 1)
        await rebuild_lost_database(cluster, tmp_path)
        await behind(cluster, 0)
        await eventually(lambda: get(cluster.meta, "/health/ready")[0] == 200, seconds=60)
        await cluster.create("new", partitions=2)


@pytest.mark.crash
async def test_metaserver_goes_on_when_the_database_lost_only_what_no_broker_has(
    running: Cluster, database: OlderFile | Standby
) -> None:
    """Lost renewals of sessions and brokers are no reason for a rebuild."""
    await running.create("orders", partitions=2)
    database.remember()
    await asyncio.sleep(1)
    database.go_back(running)
    await eventually(lambda: get(running.meta, "/health/ready")[0] == 200, seconds=60)
    await asyncio.sleep(3)
    assert get(running.meta, "/health/ready")[0] == 200
    assert samples_of(running.meta)[BEHIND] == 0
    await running.create("new", partitions=2)
