"""A broker's data folder that was copied: two live brokers of one identity are told apart, one of
them refused.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.request import urlopen

import pytest

from keylane import Producer
from keylane.protocol import endpoints
from keylane.protocol.control import AcceptFolder, BrokerHeartbeat, Health, RefusedBroker
from keylane.protocol.errors import FolderRefusedError, InvalidRequestError, WrongBrokerError
from keylane.protocol.frames import Append
from keylane.protocol.membership.versions import VERSION
from keylane.protocol.verification import Verification
from keylane.rpc.client import BrokerClient, MetaClient
from keylane.rpc.http_network import HttpNetwork
from sim.machines.store import batch
from support.brokers.broker_process import BrokerProcess
from support.cluster import Cluster, pause, resume, silent
from support.server_process import run_keylane

SUBJECT = "s"
pytestmark = pytest.mark.cluster(meta_settings="broker_heartbeat_ms = 400\nbroker_ttl_ms = 3000\n")


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
        return self.start_on_copy()

    def start_on_copy(self) -> str:
        """Run a broker on the copy that is there; its address."""
        self._running = BrokerProcess(self.copy, "--meta", self.cluster.meta)
        return self._running.start().address

    def stop_copy(self) -> None:
        if self._running is not None:
            self._running.end()
            self._running = None

    def late_report(self, broker_id: str, address: str) -> BrokerHeartbeat:
        """What the broker on the original folder has said, if it arrives now."""
        opening = json.loads((self.original / "opening.json").read_text())["opening"]
        return BrokerHeartbeat(
            version=VERSION,
            broker_group="g1",
            broker_id=broker_id,
            address=address,
            opening=opening,
        )

    def registration(self, address: str) -> str:
        """What a broker's health says of its registration."""
        with urlopen(f"http://{address}/v1/health") as answer:
            return json.load(answer)["details"]["registration"]

    def registration_once(self, address: str, words: str) -> str:
        """The same, as soon as it says `words`."""
        until = time.monotonic() + 60
        while words not in (said := self.registration(address)):
            assert time.monotonic() < until, said
            time.sleep(0.05)
        return said


@pytest.fixture
def copied(cluster: Cluster, tmp_path: Path) -> Iterator[Copied]:
    asyncio.run(cluster.create(SUBJECT, partitions=2))
    copied = Copied(cluster, tmp_path)
    try:
        yield copied
    finally:
        copied.stop_copy()


async def address_of_first(meta: str) -> str:
    network = HttpNetwork()
    try:
        health: Health = await MetaClient(network, [meta]).health()
    finally:
        await network.close()
    return {broker["broker_group"]: broker["address"] for broker in health.details["brokers"]}["g1"]


async def verified(meta: str) -> dict[str, list[str]]:
    network = HttpNetwork()
    try:
        verification: Verification = await MetaClient(network, [meta]).call(endpoints.VERIFY)
    finally:
        await network.close()
    return {check.name: check.violations for check in verification.checks if check.violations}


def test_copy_beside_its_original_is_refused(copied: Copied) -> None:
    """The second of two live brokers with one identity is refused and named; no client is sent to
    it.
    """
    original = copied.cluster.brokers[0].address
    second = copied.start_copy()
    said = copied.registration_once(second, "is a copy")
    assert original in said
    assert second in said
    assert copied.registration(original) == "registered"
    assert asyncio.run(address_of_first(copied.cluster.meta)) == original
    violations = asyncio.run(verified(copied.cluster.meta))
    assert list(violations) == ["one-broker-a-group"]
    assert second in violations["one-broker-a-group"][0]

    async def send() -> None:
        async with Producer(copied.cluster.meta) as producer:
            for number in range(200):
                producer.send(SUBJECT, b"%d" % number, key=b"k%d" % number)

    asyncio.run(send())

    async def stored(address: str) -> int:
        network = HttpNetwork()
        hosted = await BrokerClient(network, address).partitions()
        await network.close()
        return sum(partition.next_offset for partition in hosted.partitions)

    assert asyncio.run(stored(second)) == 0


def test_refused_copy_is_forgotten_when_it_ends(copied: Copied) -> None:
    """When the copy has ended and its ttl is over, `verify` reports no violation."""
    second = copied.start_copy()
    copied.registration_once(second, "is a copy")
    copied.stop_copy()
    until = time.monotonic() + 60
    while asyncio.run(verified(copied.cluster.meta)):
        assert time.monotonic() < until
        time.sleep(0.1)


def test_original_is_refused_when_its_copy_took_over(copied: Copied) -> None:
    """A folder that moved is accepted at its new place; when the old folder comes back, the old one
    is refused.
    """
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
    """A copy whose original is alive is not ready and says why; the original is ready."""
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


async def test_late_report_of_where_a_broker_was_is_no_second_broker(copied: Copied) -> None:
    """A folder that moved is not called a copy when a report from its old place comes late; the
    route stays.
    """
    original = copied.cluster.brokers[0]
    old = original.address
    original.kill()
    second = copied.start_copy()
    await asyncio.to_thread(copied.registration_once, second, "registered")
    network = HttpNetwork()
    try:
        with urlopen(f"http://{second}/v1/health") as answer:
            broker_id = json.load(answer)["details"]["broker_id"]
        late = copied.late_report(broker_id, old)
        with pytest.raises(FolderRefusedError, match="is a copy"):
            await MetaClient(network, [copied.cluster.meta]).broker_heartbeat(late)
    finally:
        await network.close()
    assert await verified(copied.cluster.meta) == {}
    assert await address_of_first(copied.cluster.meta) == second


async def test_late_report_is_no_second_broker_when_another_program_listens_where_it_was(
    copied: Copied,
) -> None:
    """The port of a broker that moved may be a metaserver's meanwhile."""
    copied.cluster.brokers[0].kill()
    second = await asyncio.to_thread(copied.start_copy)
    await asyncio.to_thread(copied.registration_once, second, "registered")
    network = HttpNetwork()
    meta = copied.cluster.meta
    try:
        broker_id = (await BrokerClient(network, second).health()).details["broker_id"]
        late = copied.late_report(broker_id, meta)
        with pytest.raises(FolderRefusedError, match="is a copy"):
            await MetaClient(network, [meta]).broker_heartbeat(late)
    finally:
        await network.close()
    assert await verified(meta) == {}
    assert await address_of_first(meta) == second


async def test_second_folder_under_one_name_is_seen(cluster: Cluster) -> None:
    """Another identity under the name of a live group is refused by name, and verify shows it."""
    await cluster.create(SUBJECT, partitions=2)
    network = HttpNetwork()
    try:
        meta = MetaClient(network, [cluster.meta])
        stranger = BrokerHeartbeat(
            version=VERSION, broker_group="g1", broker_id="other", address="127.0.0.1:9"
        )
        with pytest.raises(FolderRefusedError, match="another data folder"):
            await meta.broker_heartbeat(stranger)
    finally:
        await network.close()
    assert list(await verified(cluster.meta)) == ["one-broker-a-group"]


class CopyUnderLoad:
    """A broker's registration, and its messages, while its folder is copied and killed."""

    def __init__(self, copied: Copied) -> None:
        self.copied = copied
        self.meta = copied.cluster.meta

    async def send(self, first: int, count: int) -> None:
        """Have messages acked, each awaited."""
        async with Producer(self.meta) as producer:
            futures = [
                producer.send(SUBJECT, b"%d" % number, key=b"k%d" % number)
                for number in range(first, first + count)
            ]
            await asyncio.gather(*futures)

    async def stored(self, address: str) -> int:
        """Messages that a broker has."""
        network = HttpNetwork()
        try:
            hosted = await BrokerClient(network, address).partitions()
        finally:
            await network.close()
        return sum(partition.next_offset for partition in hosted.partitions)

    async def health(self) -> Health:
        network = HttpNetwork()
        try:
            return await MetaClient(network, [self.meta]).health()
        finally:
            await network.close()

    async def accept(self, *, dry_run: bool = False) -> RefusedBroker:
        network = HttpNetwork()
        try:
            ask = AcceptFolder(dry_run=dry_run)
            return await MetaClient(network, [self.meta]).call(
                endpoints.ACCEPT_FOLDER, ask, group="g1"
            )
        finally:
            await network.close()

    async def go_silent(self) -> None:
        """Wait until the metaserver takes the first broker for silent."""
        network = HttpNetwork()
        try:
            await silent(MetaClient(network, [self.meta]), "g1")
        finally:
            await network.close()


async def test_copy_of_a_running_folder_is_refused_when_the_original_had_come_farther(
    copied: Copied,
) -> None:
    """Acked messages stay: the older copy is refused until an operator gives up the messages that
    it lacks.
    """
    told = CopyUnderLoad(copied)
    original = copied.cluster.brokers[0]
    await told.send(0, 50)
    shutil.copytree(copied.original, copied.copy)
    await told.send(50, 400)
    acked = await told.stored(original.address)
    await asyncio.sleep(1)  # a report or two
    original.kill()
    await told.go_silent()
    second = await asyncio.to_thread(copied.start_on_copy)
    said = await asyncio.to_thread(copied.registration_once, second, "older copy")
    assert "keylane broker accept" in said
    assert await told.stored(second) < acked
    (refused,) = (await told.health()).details["refused"]
    assert refused["address"] == second
    assert refused["log_end"] < refused["known_log_end"]
    await asyncio.sleep(1)
    assert await address_of_first(copied.cluster.meta) != second

    would = await told.accept(dry_run=True)
    assert would.known_log_end == refused["known_log_end"]
    words = ("broker", "accept", "g1", "--meta", copied.cluster.meta)
    asked = await asyncio.to_thread(run_keylane, *words, text="n\n", terminal=True)
    assert asked.returncode == 1
    assert "messages that were stored between the two are given up" in asked.stderr
    assert "Give up the messages that this copy of g1's data folder lacks?" in asked.stderr
    assert "older copy" in await asyncio.to_thread(copied.registration, second)
    assert await told.accept() == would
    await asyncio.to_thread(copied.registration_once, second, "registered")
    assert await address_of_first(copied.cluster.meta) == second
    original.restart()  # the one that was left behind is the copy now
    await asyncio.to_thread(copied.registration_once, original.address, "is a copy")


async def test_copy_of_a_running_folder_is_refused_when_the_original_was_started_since(
    copied: Copied,
) -> None:
    """A copy does not know of the original's later openings, even where nothing was stored
    since.
    """
    told = CopyUnderLoad(copied)
    original = copied.cluster.brokers[0]
    await told.send(0, 20)
    original.kill()
    shutil.copytree(copied.original, copied.copy)
    original.restart()
    await asyncio.to_thread(copied.registration_once, original.address, "registered")
    original.kill()
    await told.go_silent()
    second = await asyncio.to_thread(copied.start_on_copy)
    said = await asyncio.to_thread(copied.registration_once, second, "older copy")
    assert "does not know the last start" in said
    copied.stop_copy()
    original.restart()
    await asyncio.to_thread(copied.registration_once, original.address, "registered")


async def test_broker_is_taken_when_it_listens_under_another_name_of_its_host(
    copied: Copied,
) -> None:
    """The old address reaches the same opening of the same folder: the broker is no copy of
    itself.
    """
    original = copied.cluster.brokers[0]
    port = original.address.rpartition(":")[2]
    original.kill()
    config = ("--meta", copied.cluster.meta, "--host", "localhost", "--port", port)
    broker = BrokerProcess(copied.original, *config)
    try:
        second = (await asyncio.to_thread(broker.start)).address
        assert second != original.address
        await asyncio.to_thread(copied.registration_once, second, "registered")
        assert await address_of_first(copied.cluster.meta) == second
    finally:
        broker.kill()


async def test_copy_is_not_accepted_while_the_original_is_alive(copied: Copied) -> None:
    """An operator cannot put a copy in the place of a broker that answers."""
    told = CopyUnderLoad(copied)
    second = await asyncio.to_thread(copied.start_copy)
    await asyncio.to_thread(copied.registration_once, second, "is a copy")
    with pytest.raises(InvalidRequestError, match=r"within its ttl, from .* try again once"):
        await told.accept()


async def test_broker_is_taken_again_when_it_was_killed_often_without_a_metaserver(
    copied: Copied,
) -> None:
    """A folder is no copy after openings that no metaserver heard of, nor after it was moved."""
    told = CopyUnderLoad(copied)
    original = copied.cluster.brokers[0]
    await told.send(0, 20)
    copied.cluster.meta_program.kill()
    for _ in range(4):
        original.kill()
        original.restart()
    original.kill()
    copied.original.rename(copied.copy)
    copied.cluster.meta_program.restart()
    second = await asyncio.to_thread(copied.start_on_copy)
    await asyncio.to_thread(copied.registration_once, second, "registered")
    assert await address_of_first(copied.cluster.meta) == second


async def test_broker_takes_no_messages_when_another_folder_stands_for_its_group(
    copied: Copied,
) -> None:
    """The original stood still while a copy took over; it acks no message of a producer that still
    knows it.
    """
    original = copied.cluster.brokers[0]
    network = HttpNetwork()
    try:
        broker = BrokerClient(network, original.address)
        (hosted, *_) = (await broker.partitions()).partitions
        producer_id = 7
        answer, _ = await broker.call(
            Append(hosted.partition_id),
            batch(partition_id=hosted.partition_id, producer_id=producer_id),
        )
        assert answer.base_offset == 0
        pause(original.process.pid)
        second = await asyncio.to_thread(copied.start_copy)
        await asyncio.to_thread(copied.registration_once, second, "registered")
        resume(original.process.pid)
        await asyncio.to_thread(copied.registration_once, original.address, "is a copy")
        with pytest.raises(WrongBrokerError, match="does not serve its group"):
            await broker.call(
                Append(hosted.partition_id),
                batch(partition_id=hosted.partition_id, producer_id=producer_id, sequence=2),
            )
    finally:
        resume(original.process.pid)
        await network.close()


async def test_older_folder_in_the_place_of_the_newer_serves_nothing(copied: Copied) -> None:
    """An older folder is started at the same address; it serves no message before the metaserver
    has refused it.
    """
    told = CopyUnderLoad(copied)
    original = copied.cluster.brokers[0]
    await told.send(0, 20)
    shutil.copytree(copied.original, copied.copy)
    await told.send(20, 100)
    await asyncio.sleep(1.5)  # a report
    original.kill()
    newer = copied.original.with_name("newer")
    copied.original.rename(newer)
    copied.copy.rename(copied.original)
    network = HttpNetwork()
    try:
        await asyncio.to_thread(original.restart)
        broker = BrokerClient(network, original.address)
        (hosted, *_) = (await broker.partitions()).partitions
        with pytest.raises(WrongBrokerError, match="older copy"):
            await broker.call(Append(hosted.partition_id), batch(partition_id=hosted.partition_id))
        assert (
            await broker.control(endpoints.PARTITION, id=hosted.partition_id)
        ).next_offset == hosted.next_offset
    finally:
        await network.close()
    original.kill()
    copied.original.rename(copied.copy)
    newer.rename(copied.original)
    await asyncio.to_thread(original.restart)
    await asyncio.to_thread(copied.registration_once, original.address, "registered")
    await told.send(120, 20)
