"""A broker's data folder that was copied: two live brokers of one identity are told apart, one of them refused."""

from __future__ import annotations

import asyncio
import json
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.request import urlopen

import pytest

from broker_process import BrokerProcess
from cluster import Cluster
from keylane import Producer
from keylane.protocol.control import BrokerHeartbeat, Health
from keylane.protocol.errors import DataFolderError
from keylane.protocol.verification import Verification
from keylane.rpc.client import BrokerClient, MetaClient
from keylane.rpc.http_network import HttpNetwork

SUBJECT = "s"


class Copied:
    """A cluster, a running copy of its first broker, and calls to both."""

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        self.cluster = cluster
        self.original = folder / "broker-1"
        self.copy = folder / "copy"
        self._running: BrokerProcess | None = None

    def start_copy(self) -> str:
        """Copy the folder as it is and run a broker on it; its address."""
        shutil.copytree(self.original, self.copy)
        self._running = BrokerProcess(self.copy, "--meta", self.cluster.meta)
        return self._running.start().address

    def stop_copy(self) -> None:
        if self._running is not None:
            self._running.end()
            self._running = None

    def registration(self, address: str) -> str:
        """What a broker's health says of its registration."""
        with urlopen(f"http://{address}/v1/health") as answer:
            return json.load(answer)["details"]["registration"]

    def registration_once(self, address: str, words: str) -> str:
        """The same, as soon as it says `words`."""
        until = time.monotonic() + 15
        while words not in (said := self.registration(address)):
            assert time.monotonic() < until, said
            time.sleep(0.05)
        return said


@pytest.fixture
def copied(own_cluster: Cluster, tmp_path: Path) -> Iterator[Copied]:
    asyncio.run(own_cluster.create(SUBJECT, partitions=2))
    found = Copied(own_cluster, tmp_path)
    try:
        yield found
    finally:
        found.stop_copy()


async def address_of_first(meta: str) -> str:
    network = HttpNetwork()
    try:
        health: Health = await MetaClient(network, [meta]).health()
    finally:
        await network.close()
    return {one["broker_group"]: one["address"] for one in health.details["brokers"]}["g1"]


async def verified(meta: str) -> dict[str, list[str]]:
    network = HttpNetwork()
    try:
        found: Verification = await MetaClient(network, [meta]).verify()
    finally:
        await network.close()
    return {one.name: one.violations for one in found.checks if one.violations}


def test_a_copy_beside_its_original_is_refused(copied: Copied) -> None:
    """The second of two live brokers on one identity is refused and named; nobody is ever sent to it."""
    original = copied.cluster.brokers[0].address
    second = copied.start_copy()
    said = copied.registration_once(second, "is a copy")
    assert original in said
    assert second in said
    assert copied.registration(original) == "registered"
    assert asyncio.run(address_of_first(copied.cluster.meta)) == original
    found = asyncio.run(verified(copied.cluster.meta))
    assert list(found) == ["one-broker-a-group"]
    assert second in found["one-broker-a-group"][0]

    async def send() -> None:
        async with Producer(copied.cluster.meta) as producer:
            for number in range(200):
                producer.send(SUBJECT, b"%d" % number, key=b"k%d" % number)

    asyncio.run(send())

    async def stored(address: str) -> int:
        network = HttpNetwork()
        hosted = await BrokerClient(network, address).partitions()
        await network.close()
        return sum(one.next_offset for one in hosted.partitions)

    assert asyncio.run(stored(second)) == 0


def test_a_refused_copy_is_forgotten_when_it_ends(copied: Copied) -> None:
    """Once the copy has ended, and its ttl, nothing is left to complain of."""
    second = copied.start_copy()
    copied.registration_once(second, "is a copy")
    copied.stop_copy()
    until = time.monotonic() + 20
    while asyncio.run(verified(copied.cluster.meta)):
        assert time.monotonic() < until
        time.sleep(0.5)


def test_the_original_is_refused_when_its_copy_took_over(copied: Copied) -> None:
    """A folder that moved is taken at its new place; if the old one comes back, it is the one refused."""
    original = copied.cluster.brokers[0]
    original.kill()
    second = copied.start_copy()
    copied.registration_once(second, "registered")
    assert asyncio.run(address_of_first(copied.cluster.meta)) == second
    original.restart()
    copied.registration_once(original.address, "is a copy")
    assert copied.registration(second) == "registered"
    assert asyncio.run(address_of_first(copied.cluster.meta)) == second


async def test_broker_is_not_ready_while_the_metaserver_refuses_it(copied: Copied) -> None:
    """A copy whose original is alive says that it serves nobody, and why; the original is ready."""
    copy = copied.start_copy()
    copied.registration_once(copy, "is a copy")
    network = HttpNetwork()
    try:
        health = await BrokerClient(network, copy).health()
        assert not health.ready
        assert "the metaserver refuses this broker" in health.reason
        original = await address_of_first(copied.cluster.meta)
        assert (await BrokerClient(network, original).health()).ready
    finally:
        await network.close()


async def test_a_late_report_of_where_a_broker_was_is_no_second_broker(copied: Copied) -> None:
    """A folder that moved is not called a copy when a report from its old place comes late; the route stays."""
    original = copied.cluster.brokers[0]
    old = original.address
    original.kill()
    second = copied.start_copy()
    await asyncio.to_thread(copied.registration_once, second, "registered")
    network = HttpNetwork()
    try:
        with urlopen(f"http://{second}/v1/health") as answer:
            broker_id = json.load(answer)["details"]["broker_id"]
        late = BrokerHeartbeat(broker_group="g1", broker_id=broker_id, address=old)
        with pytest.raises(DataFolderError, match="is a copy"):
            await MetaClient(network, [copied.cluster.meta]).broker_heartbeat(late)
    finally:
        await network.close()
    assert await verified(copied.cluster.meta) == {}
    assert await address_of_first(copied.cluster.meta) == second


async def test_a_second_folder_under_one_name_is_seen(own_cluster: Cluster) -> None:
    """Another identity under the name of a live group is refused by name, and verify shows it."""
    await own_cluster.create(SUBJECT, partitions=2)
    network = HttpNetwork()
    try:
        meta = MetaClient(network, [own_cluster.meta])
        stranger = BrokerHeartbeat(broker_group="g1", broker_id="other", address="127.0.0.1:9")
        with pytest.raises(DataFolderError, match="another data folder"):
            await meta.broker_heartbeat(stranger)
    finally:
        await network.close()
    assert list(await verified(own_cluster.meta)) == ["one-broker-a-group"]
