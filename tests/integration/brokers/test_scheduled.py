"""Messages for a later delivery at the brokers of a real cluster: at their times, once each, over kills; canceled."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

import pytest

from keylane import (
    CancelOutcome,
    DeliverAtError,
    DeliverAtKeyError,
    Message,
    Producer,
    QueueReader,
    ScheduledReceipt,
    ScheduledUnknownError,
    SubjectUnknownError,
)
from keylane.protocol.control import Route
from keylane.rpc.client import BrokerClient
from keylane.rpc.http_network import HttpNetwork
from support.cluster import Cluster, read_partition

LATE_S = 1.0
"""A bound for a loaded machine; on a quiet one the 99th percentile is within 100 ms."""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A test that kills a broker starts it again; each test has a subject of its own."""
    with Cluster(tmp_path_factory.mktemp("cluster"), brokers=2) as cluster:
        yield cluster


def now_ms() -> int:
    return time.time_ns() // 1_000_000


async def stored(route: Route) -> list[Message]:
    """Every stored message of a subject."""
    network = HttpNetwork()
    try:
        messages = []
        for partition in route.partitions:
            broker = BrokerClient(network, partition.address)
            messages += await read_partition(broker, route.subject, partition.partition_id)
            await broker.close()
        return messages
    finally:
        await network.close()


async def stored_when(route: Route, count: int, *, seconds: float = 20) -> list[Message]:
    """The stored messages of a subject, once there are as many."""
    until = time.monotonic() + seconds
    while True:
        messages = await stored(route)
        if len(messages) >= count:
            return messages
        assert time.monotonic() < until, f"{len(messages)} of {count} messages are stored"
        await asyncio.sleep(0.05)


async def test_a_scheduled_message_is_stored_at_its_time(cluster):
    """Not before; with its value and properties, as it was sent."""
    route = await cluster.create("at-its-time")
    async with Producer(cluster.meta) as producer:
        due = datetime.now(UTC) + timedelta(seconds=1)
        receipt = await producer.send(
            route.subject, b"later", properties={"kind": "reminder"}, deliver_at=due
        )
        assert isinstance(receipt, ScheduledReceipt)
        assert receipt.subject == route.subject
        assert receipt.durable == "fsync"
        assert 0 <= receipt.deliver_at_ms - due.timestamp() * 1000 <= 1
        await asyncio.sleep((receipt.deliver_at_ms - now_ms()) / 1000 - 0.2)
        assert await stored(route) == []
        (message,) = await stored_when(route, 1)
        assert now_ms() - receipt.deliver_at_ms < LATE_S * 1000
        assert (message.key, message.value) == (b"", b"later")
        assert dict(message.properties) == {"kind": "reminder"}
