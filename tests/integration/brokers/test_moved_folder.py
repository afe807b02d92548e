"""A data folder that moves to another host while its broker is stopped: clients go on, leases,
offsets and idempotence hold.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from keylane import Admin, Consumer, Producer
from keylane.protocol.errors import FencedError
from keylane.protocol.frames import Ack, Acquire, Append
from keylane.rpc.client import BrokerClient
from keylane.rpc.http_network import HttpNetwork
from sim.machines.store import batch
from support.brokers.broker_process import BrokerProcess
from support.cluster import Cluster

OTHER_HOST = "127.0.0.2"
SUBJECT, GROUP = "s", "watched"
KEYS = [b"key-%d" % number for number in range(12)]
TTL_MS = 30_000
pytestmark = pytest.mark.cluster(meta_settings="broker_heartbeat_ms = 400\nbroker_ttl_ms = 3000\n")


class MovedBroker:
    """The first broker of a cluster, and where it goes on after its folder has moved."""

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        self._cluster = cluster
        self._before = folder / "broker-1"
        self._after = folder / "another disk" / "data"
        self._process: BrokerProcess | None = None

    def leave(self) -> None:
        """Stop the broker."""
        self._cluster.brokers[0].stop()

    def arrive(self) -> str:
        """Take its folder to another place, and start it at another address; returns this
        address.
        """
        self._after.parent.mkdir()
        shutil.copytree(self._before, self._after)
        shutil.rmtree(self._before)
        self._process = BrokerProcess(
            self._after, "--meta", self._cluster.meta, "--host", OTHER_HOST
        )
        return self._process.start().address

    def stop(self) -> None:
        if self._process is not None:
            assert self._process.end() == 0


@pytest.fixture
def moved(cluster: Cluster, tmp_path: Path) -> Iterator[MovedBroker]:
    moved = MovedBroker(cluster, tmp_path)
    yield moved
    moved.stop()


@pytest.fixture
async def network() -> AsyncIterator[HttpNetwork]:
    network = HttpNetwork()
    yield network
    await network.close()


async def test_partition_keeps_its_state_when_its_folder_moves(
    cluster: Cluster, moved: MovedBroker, network: HttpNetwork
) -> None:
    """A repeated batch is stored once, an older token is refused, the cursor and what is acked
    above it stay.
    """
    route = await cluster.create(SUBJECT, partitions=2)
    address = cluster.brokers[0].address
    number = next(each.partition_id for each in route.partitions if each.address == address)
    broker = BrokerClient(network, address)
    first, second = (batch(partition_id=number, sequence=sequence) for sequence in (0, 2))
    for payload in (first, second):
        await broker.call(Append(number), payload)
    async with Admin(cluster.meta) as admin:
        await admin.create_group(SUBJECT, GROUP)
    await broker.call(Acquire(number, GROUP, "before", 7, TTL_MS))
    await broker.call(Ack(number, GROUP, "before", 7, ((0, 1), (2, 3))))

    await asyncio.to_thread(moved.leave)
    new_address = await asyncio.to_thread(moved.arrive)
    assert new_address.startswith(f"{OTHER_HOST}:")
    broker = BrokerClient(network, new_address)
    again, _ = await broker.call(Append(number), second)
    assert (again.base_offset, again.duplicate) == (2, True)
    with pytest.raises(FencedError):
        await broker.call(Acquire(number, GROUP, "stale", 6, TTL_MS))
    with pytest.raises(FencedError):
        await broker.call(Ack(number, GROUP, "stale", 6, ((1, 2),)))
    taken, _ = await broker.call(Acquire(number, GROUP, "after", 8, TTL_MS))
    assert (taken.cursor, taken.ranges, taken.next_offset) == (1, ((2, 3),), 4)
    with pytest.raises(FencedError):
        await broker.call(Ack(number, GROUP, "before", 7, ((1, 2),)))
    later, _ = await broker.call(Append(number), batch(partition_id=number, sequence=4))
    assert (later.base_offset, later.duplicate) == (4, False)


async def test_clients_go_on_when_a_folder_moves_to_another_host(
    cluster: Cluster, moved: MovedBroker
) -> None:
    """Producer and consumer stay open; each message is stored and handled once, in the order of its
    key.
    """
    await cluster.create(SUBJECT, partitions=4)
    sent: dict[bytes, list[bytes]] = {key: [] for key in KEYS}
    handled: dict[bytes, list[bytes]] = {key: [] for key in KEYS}

    async def handle(consumer: Consumer) -> None:
        async for message in consumer:
            handled[message.key].append(message.value)
            await message.ack()

    async def all_are_handled() -> None:
        async with asyncio.timeout(90):
            while sum(map(len, handled.values())) < sum(map(len, sent.values())):
                await asyncio.sleep(0.05)

    def send(producer: Producer) -> None:
        for key in KEYS:
            value = b"%d" % len(sent[key])
            sent[key].append(value)
            producer.send(SUBJECT, value, key=key)

    async with (
        Producer(cluster.meta) as producer,
        Consumer(cluster.meta, subject=SUBJECT, group=GROUP, ack="each") as consumer,
    ):
        handling = asyncio.create_task(handle(consumer))
        for _ in range(10):
            send(producer)
        await producer.flush()
        await all_are_handled()
        await asyncio.to_thread(moved.leave)
        for _ in range(10):
            send(producer)
            await asyncio.sleep(0.05)
        await asyncio.to_thread(moved.arrive)
        for _ in range(10):
            send(producer)
        await producer.flush()
        await all_are_handled()
        handling.cancel()
    assert handled == sent
    await cluster.check_history(SUBJECT, sent)
