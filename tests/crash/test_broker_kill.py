"""A real broker killed under load and started again: nothing answered is lost, nothing is stored
twice.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator

import pytest

from keylane.protocol import endpoints
from keylane.protocol.batch import batch_starts, columns
from keylane.protocol.errors import FencedError, KeylaneError
from keylane.protocol.frames import Ack, Acquire, Append, Read
from keylane.rpc.client import BrokerClient
from keylane.rpc.http_network import HttpNetwork
from sim.machines.store import SESSION, batch, facts
from support.brokers.broker_process import BrokerProcess
from support.ports import free_port

PRODUCERS = 4
BATCHES = 150
PER_BATCH = 20
KILLS = 4
PIPELINE = 8

pytestmark = pytest.mark.crash


@pytest.fixture
def process(tmp_path) -> Iterator[BrokerProcess]:
    where = ("--port", str(free_port()))
    process = BrokerProcess(tmp_path / "data", "--segment-bytes", "200000", *where)
    yield process
    process.end()


class BatchSender:
    """Sends its batches in order, several in flight, and after an error again from the first
    without an answer.
    """

    def __init__(self, producer_id: int) -> None:
        self.producer_id = producer_id
        self.partition_id = 1 + producer_id % 2
        self.offsets: dict[int, int] = {}

    def data_of(self, number: int) -> bytes:
        return batch(
            partition_id=self.partition_id,
            producer_id=self.producer_id,
            sequence=PER_BATCH * number,
            count=PER_BATCH,
            value=b"%d" % self.producer_id,
        )

    async def send(self, client: BrokerClient, number: int) -> None:
        answer, _ = await client.call(Append(self.partition_id), self.data_of(number))
        known = self.offsets.setdefault(number, answer.base_offset)
        assert answer.base_offset in (known, -1)

    async def run(self, client: BrokerClient) -> None:
        while len(self.offsets) < BATCHES:
            left = [number for number in range(BATCHES) if number not in self.offsets]
            outcomes = await asyncio.gather(
                *(self.send(client, number) for number in left[:PIPELINE]), return_exceptions=True
            )
            for error in outcomes:
                if isinstance(error, KeylaneError):
                    await asyncio.sleep(0.02)
                elif error is not None:
                    raise error


async def read_all(client: BrokerClient, partition_id: int) -> list[tuple[int, int]]:
    """(producer, number of its message) at each offset."""
    messages = []
    offset = 0
    while True:
        answer, payload = await client.call(Read(partition_id, offset, 1 << 20))
        if answer.upto == offset:
            return messages
        for at, header in batch_starts(payload):
            assert header.base_offset == len(messages)
            cut = columns(payload, header, at)
            for start, end in zip(cut.value_edges, cut.value_edges[1:], strict=False):
                producer, number = cut.blob[start:end].split()
                messages.append((int(producer), int(number)))
        offset = answer.upto


async def test_broker_loses_nothing_when_killed_under_load(process):
    """SIGKILL at any moment: every answered batch is at the offset that was answered, every message
    there once.
    """
    rng = random.Random(3)
    network = HttpNetwork()
    senders = [BatchSender(producer_id) for producer_id in range(1, PRODUCERS + 1)]
    process.start()
    clients = [BrokerClient(network, process.address) for _ in senders]
    for partition_id in (1, 2):
        await clients[0].control(endpoints.HOST_PARTITION, facts(partition_id))
    tasks = [
        asyncio.create_task(sender.run(client))
        for sender, client in zip(senders, clients, strict=True)
    ]
    for kill in range(1, KILLS + 1):
        goal = kill * PRODUCERS * BATCHES // (KILLS + 1)
        while sum(len(sender.offsets) for sender in senders) < goal:
            await asyncio.sleep(0.002)
        await asyncio.sleep(rng.random() * 0.01)
        await asyncio.to_thread(process.kill)
        await asyncio.to_thread(process.start)
    await asyncio.gather(*tasks)

    for partition_id in (1, 2):
        stored = await read_all(clients[0], partition_id)
        for sender in senders:
            if sender.partition_id != partition_id:
                continue
            mine = [number for producer, number in stored if producer == sender.producer_id]
            assert mine == list(range(BATCHES * PER_BATCH))
            for number, offset in sender.offsets.items():
                if offset >= 0:
                    assert stored[offset] == (sender.producer_id, PER_BATCH * number)
        assert len(stored) == 2 * BATCHES * PER_BATCH
    for client in clients:
        await client.close()
    await network.close()


async def test_killed_broker_keeps_fence_cursor_and_sequence(process):
    """After SIGKILL the older owner is still fenced, the cursor stands, and a batch sent again is
    recognised.
    """
    process.start()
    network = HttpNetwork()
    client = BrokerClient(network, process.address)
    await client.control(endpoints.HOST_PARTITION, facts())
    await client.call(Append(1), batch(count=10))
    await client.call(Acquire(1, "audit", "b" * 16, 1, 30_000))
    await client.call(Acquire(1, "audit", SESSION, 2, 30_000))
    await client.call(Ack(1, "audit", SESSION, 2, ((0, 4), (6, 8))))
    await client.close()
    process.kill()
    process.start()
    client = BrokerClient(network, process.address)

    with pytest.raises(FencedError):
        await client.call(Ack(1, "audit", "b" * 16, 1, ((4, 5),)))
    with pytest.raises(FencedError):
        await client.call(Acquire(1, "audit", "b" * 16, 1, 30_000))
    again, _ = await client.call(Append(1), batch(count=10))
    assert (again.base_offset, again.duplicate) == (0, True)
    acquired, _ = await client.call(Acquire(1, "audit", "c" * 16, 3, 30_000))
    assert (acquired.cursor, acquired.ranges, acquired.next_offset) == (4, ((6, 8),), 10)
    await client.close()
    await network.close()
