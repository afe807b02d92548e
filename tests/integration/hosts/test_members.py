"""Versions and names of clusters, as real programs tell and check them."""

from __future__ import annotations

import asyncio
import json
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from keylane import Admin
from keylane.cli.connection import wait_for_brokers
from keylane.protocol.membership.versions import OWN, VERSION
from keylane.rpc.client import BrokerClient
from keylane.rpc.http_network import HttpNetwork
from support.server_process import ServerProcess, run_keylane


def ready(process: ServerProcess) -> str:
    address = json.loads(process.stdout.readline())["address"]
    assert isinstance(address, str)
    return address


@pytest.fixture
def start() -> Iterator:
    processes: list[ServerProcess] = []

    def started(program: str, data: Path, *arguments: str) -> str:
        given = ("--data", str(data), "--port", "0", *arguments)
        processes.append(ServerProcess(f"keylane.{program}", given))
        return ready(processes[-1])

    yield started
    for process in reversed(processes):
        process.terminate()
        process.wait(20)
        process.stdout.close()


async def test_versions_of_all_members_are_shown(start, tmp_path: Path) -> None:
    meta = start("metaserver", tmp_path / "m", "--cluster", "north")
    start("broker", tmp_path / "b", "--group", "g1", "--meta", meta, "--cluster", "north")
    async with Admin(meta, wait_s=30) as admin:
        await wait_for_brokers(admin, 1)
        (broker,) = (await admin.list_brokers()).brokers
        assert broker.version == VERSION
        view = await admin.describe_cluster()
    assert (view.name, view.version, view.held_back_by) == ("north", str(OWN), ())
    told = [(member.name, member.version) for member in view.members]
    assert told == [("broker group g1", VERSION), (f"metaserver {meta}", VERSION)]
    shown = run_keylane("cluster", "versions", "--meta", meta)
    assert shown.returncode == 0, shown.stderr
    assert all(
        text in shown.stdout for text in (f"cluster north: version {OWN}", "broker group g1")
    )
    shown = run_keylane("cluster", "versions", "--meta", meta, "--output", "json")
    assert json.loads(shown.stdout)["version"] == str(OWN)


async def test_broker_of_another_cluster_is_refused_with_advice(start, tmp_path: Path) -> None:
    meta = start("metaserver", tmp_path / "m", "--cluster", "north")
    place = ("--group", "g1", "--meta", meta, "--cluster", "south")
    address = start("broker", tmp_path / "b", *place)
    network = HttpNetwork()
    client = BrokerClient(network, address)
    async with asyncio.timeout(30):
        while "south" not in (health := await client.health()).reason:
            await asyncio.sleep(0.05)
    assert not health.ready
    async with Admin(meta) as admin:
        assert (await admin.list_brokers()).brokers == []
    await client.close()
    await network.close()


def test_metaserver_refuses_the_database_of_another_cluster(start, tmp_path: Path) -> None:
    """Two clusters on one database: the second is told, and nothing is changed."""
    url = f"sqlite+aiosqlite:///{tmp_path / 'shared.db'}"
    start("metaserver", tmp_path / "m1", "--cluster", "north", "--database-url", url)
    given = ("--data", str(tmp_path / "m2"), "--cluster", "south", "--port", "0")
    done = run_keylane("metaserver", "run", *given, "--database-url", url)
    assert done.returncode == 1
    assert "ConflictError 1365" in done.stderr
    assert "its own database" in done.stderr


@pytest.mark.parametrize(("reached", "error"), [("0.9", "VersionError 1363"), (str(OWN), "")])
def test_metaserver_is_refused_when_the_cluster_is_past_its_version(
    tmp_path: Path, reached: str, error: str
) -> None:
    done = run_keylane("meta", "migrate", "--data", str(tmp_path))
    assert done.returncode == 0, done.stderr
    with closing(sqlite3.connect(tmp_path / "meta.db")) as connection, connection:
        connection.execute("UPDATE facts SET value = ? WHERE name = 'cluster version'", (reached,))
    done = run_keylane("meta", "migrate", "--data", str(tmp_path))
    assert (done.returncode, error in done.stderr) == (bool(error), True)
