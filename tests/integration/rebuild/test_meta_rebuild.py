"""`keylane meta`: a metaserver's database is lost and rebuilt from the brokers, while clients
wait.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from keylane import Consumer, Message, Producer
from keylane.consumer import ConsumerSettings
from keylane.metaserver.rebuild.service import rebuild_database
from keylane.metaserver.settings import metaserver_settings
from keylane.protocol import endpoints
from keylane.protocol.control import OwnerView, PartitionStatus, Retention
from keylane.protocol.operations import OperationKind, OperationState, Reshape
from keylane.protocol.routing import PartitionState, Route
from keylane.rpc.client import BrokerClient, MetaClient
from keylane.rpc.http_network import HttpNetwork
from support.cluster import Cluster, eventually
from support.postgres import Postgres
from support.server_process import run_keylane

KEYS = 40
RETENTIONS = {"flights": Retention.TIME, "quiet": Retention.ACKED}
SETTINGS = ConsumerSettings(ttl_ms=1_500)


class Lost:
    """A cluster whose metaserver's database can be thrown away."""

    def __init__(self, folder: Path, postgres: Postgres | None) -> None:
        self.folder = folder
        self._postgres = postgres
        self.url = None if postgres is None else postgres.url()
        settings = "" if self.url is None else f'database_url = "{self.url}"'
        self.cluster = Cluster(folder, meta_settings=settings)

    @property
    def where(self) -> list[str]:
        """The options that name the database."""
        if self.url is not None:
            return ["--database-url", self.url]
        return ["--data", str(self.folder / "meta-0")]

    def lose(self) -> None:
        """Kill the metaserver and delete its database."""
        self.cluster.meta_program.kill()
        if self._postgres is None:
            shutil.rmtree(self.folder / "meta-0")
        else:
            assert self.url is not None
            name = self.url.split("?")[0].rsplit("/", 1)[1]
            for statement in ("DROP SCHEMA public CASCADE", "CREATE SCHEMA public"):
                self._postgres.execute(statement, database=name)

    def keylane(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run the command line."""
        return run_keylane(*arguments)

    def rebuild(self, *more: str) -> subprocess.CompletedProcess[str]:
        brokers = [f"--broker={broker.address}" for broker in self.cluster.brokers]
        return self.keylane("meta", "rebuild", *self.where, *brokers, "--output=json", *more)


@pytest.fixture(params=["sqlite", "postgresql"])
def lost(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Lost]:
    on_server = request.param == "postgresql"
    lost = Lost(tmp_path, request.getfixturevalue("postgres") if on_server else None)
    try:
        yield lost
    finally:
        lost.cluster.stop()


async def resize(meta: MetaClient, subject: str, partitions: int) -> None:
    await meta.call(
        endpoints.RESHAPE,
        Reshape(kind=OperationKind.RESIZE, subject=subject, partitions=partitions),
    )
    for _ in range(500):
        (latest, *_) = (await meta.call(endpoints.OPERATIONS, subject=subject)).operations
        if latest.state is OperationState.DONE:
            return
        await asyncio.sleep(0.02)
    raise AssertionError(latest)


def lasting(route: Route) -> list[tuple[object, ...]]:
    """The facts of a route that must not change."""
    return [
        (
            partition.partition_id,
            partition.name,
            partition.queue,
            partition.range_start,
            partition.range_end,
            partition.broker_group,
            partition.state,
            partition.parents,
        )
        for partition in route.partitions
    ]


async def at_brokers(cluster: Cluster) -> dict[int, PartitionStatus]:
    network = HttpNetwork()
    try:
        lists = [
            await BrokerClient(network, broker.address).partitions() for broker in cluster.brokers
        ]
    finally:
        await network.close()
    return {status.partition_id: status for hosted in lists for status in hosted.partitions}


def assert_order(handled: list[Message], sent: dict[bytes, list[bytes]]) -> None:
    """Each key has all its values, in the order of sending; values that were not acked may come
    again.
    """
    seen: dict[bytes, list[bytes]] = {}
    for message in handled:
        values = seen.setdefault(message.key, [])
        if message.value not in values:
            values.append(message.value)
    assert seen == sent


async def owners_of_open_partitions(meta: MetaClient) -> list[OwnerView]:
    """The owners when all open partitions have one: sessions of before handle until their leases
    end.
    """
    until = time.monotonic() + 60
    while True:
        owners = [
            owner
            for owner in (await meta.call(endpoints.GROUP, subject="flights", group="g")).owners
            if owner.partition.state is PartitionState.OPEN
        ]
        if owners and all(owner.session for owner in owners):
            return owners
        assert time.monotonic() < until, owners
        await asyncio.sleep(0.05)


def assert_progress_is_kept(
    before: dict[int, PartitionStatus], after: dict[int, PartitionStatus]
) -> None:
    """At the brokers no fact of a partition has changed, and no group's cursor or token is
    lower.
    """
    for partition_id, status in after.items():
        assert status.facts.retention is RETENTIONS[status.subject]
        old = {group.group: group for group in before[partition_id].groups}
        assert status.facts == before[partition_id].facts
        for group in status.groups:
            if group.group in old:
                assert group.cursor >= old[group.group].cursor
                assert group.token >= old[group.group].token


async def test_clients_continue_over_a_rebuilt_database(lost: Lost) -> None:
    """Routes stay, cursors and tokens are not lower, and the order holds, for producers and
    consumers that ran on.
    """
    cluster = lost.cluster
    await cluster.create("flights", partitions=3, strategy="strict", retention=Retention.TIME)
    await cluster.create("quiet", partitions=2, strategy="best_tried")
    network = HttpNetwork()
    meta = MetaClient(network, [cluster.meta])
    sent: dict[bytes, list[bytes]] = {}
    handled: list[Message] = []
    numbers = iter(range(1 << 30))

    async with (
        Producer(cluster.meta) as producer,
        Consumer(
            cluster.meta, subject="flights", group="g", handler=handled.append, settings=SETTINGS
        ),
        Consumer(
            cluster.meta, subject="flights", group="g", handler=handled.append, settings=SETTINGS
        ),
    ):

        def send(count: int) -> None:
            for number in (next(numbers) for _ in range(count)):
                key, value = b"k%d" % (number % KEYS), b"%d" % number
                sent.setdefault(key, []).append(value)
                producer.send("flights", value, key=key)

        send(1_000)
        await eventually(lambda: len(handled) >= 1_000)
        await resize(meta, "flights", 4)
        send(1_000)
        await eventually(lambda: len(handled) >= 2_000)
        route_before = await meta.route("flights")
        owners_before = (await meta.call(endpoints.GROUP, subject="flights", group="g")).owners
        cursors_before = await at_brokers(cluster)

        lost.lose()
        send(500)
        done = await asyncio.to_thread(lost.rebuild)
        assert done.returncode == 0, done.stderr
        told = {subject["subject"]: subject for subject in json.loads(done.stdout)}
        assert told["quiet"]["order_strategy"] == "best_tried"
        assert told["flights"]["partitions"] == len(cursors_before) - 2
        cluster.meta_program.restart()
        send(500)
        await eventually(lambda: len({message.value for message in handled}) >= 3_000, seconds=60)

        route = await meta.route("flights")
        owners = await owners_of_open_partitions(meta)
    assert_order(handled, sent)
    assert lasting(route) == lasting(route_before)
    assert route.version > route_before.version
    assert min(owner.token for owner in owners) > max(owner.token for owner in owners_before)
    assert (await meta.call(endpoints.SUBJECT, subject="flights")).retention is Retention.TIME
    assert_progress_is_kept(cursors_before, await at_brokers(cluster))

    verified = lost.keylane("meta", "verify", "--meta", cluster.meta, "--output=json")
    assert verified.returncode == 0, verified.stdout
    await network.close()


async def test_rebuild_is_refused_when_a_database_is_filled_or_a_broker_missing(lost: Lost) -> None:
    """A database with subjects is not changed. A missing or silent broker is named, and nothing is
    written.
    """
    cluster = lost.cluster
    await cluster.create("s", partitions=2)
    again = lost.rebuild()
    assert again.returncode == 1
    assert "not empty" in json.loads(again.stderr)["message"]

    lost.lose()
    option = f"--broker={cluster.brokers[0].address}"
    partly = lost.keylane("meta", "rebuild", *lost.where, option)
    assert partly.returncode == 1
    assert "name every broker" in partly.stderr
    silent = lost.rebuild("--broker=127.0.0.1:1")
    assert silent.returncode == 1
    assert lost.rebuild().returncode == 0
    cluster.meta_program.restart()
    network = HttpNetwork()
    try:
        assert len((await MetaClient(network, [cluster.meta]).route("s")).partitions) == 2
    finally:
        await network.close()


async def test_rebuild_tells_how_many_brokers_have_answered(lost: Lost) -> None:
    """After each answer, whatever their order."""
    lost.lose()
    addresses = [broker.address for broker in lost.cluster.brokers]
    settings = metaserver_settings({"data": lost.folder / "meta-0", "database_url": lost.url})
    told: list[tuple[int, int]] = []
    network = HttpNetwork()
    try:
        await rebuild_database(
            settings, network, addresses, on_progress=lambda *progress: told.append(progress)
        )
    finally:
        await network.close()
    assert told == [(count, len(addresses)) for count in range(1, len(addresses) + 1)]


def test_verify_shows_every_check(lost: Lost) -> None:
    """Thirteen lines, all ok; with a broker gone its check fails, and so does the command."""
    cluster = lost.cluster
    asyncio.run(cluster.create("s", partitions=2))
    shown = lost.keylane("meta", "verify", "--meta", cluster.meta)
    assert shown.returncode == 0, shown.stderr
    assert sum(f"V{number:02} " in shown.stdout for number in range(1, 14)) == 13
    for broker in cluster.brokers:
        broker.kill()
    verified = lost.keylane("meta", "verify", "--meta", cluster.meta, "--output=json")
    for broker in cluster.brokers:
        broker.restart()
    assert verified.returncode == 1
    checks = json.loads(verified.stdout)["checks"]
    assert [check["name"] for check in checks if check["violations"]] == ["hosted-as-known"]


def test_migrate_makes_the_schema(tmp_path: Path) -> None:
    """`meta migrate` brings a new database to the newest revision, and says so."""
    done = run_keylane("meta", "migrate", "--data", str(tmp_path / "new"))
    assert done.returncode == 0, done.stderr
    assert "sqlite: the schema is at revision" in done.stdout
    assert (tmp_path / "new" / "meta.db").exists()
