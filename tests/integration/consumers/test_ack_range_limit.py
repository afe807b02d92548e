"""More gaps among handled messages than a cursor keeps: acks wait for older messages, and then
continue.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from keylane import Consumer, Message, Producer
from keylane.consumer import ConsumerSettings
from keylane.protocol import endpoints
from keylane.protocol.control import GroupStatus
from keylane.protocol.limits import ACK_RANGES_MAX
from keylane.rpc.client import BrokerClient
from keylane.rpc.http_network import HttpNetwork
from support.cluster import Cluster, eventually

PAIRS = ACK_RANGES_MAX + 600
"""Messages of a slow key, each followed by one of another key, so that no two acked offsets are
neighbours.
"""


class Subject:
    """One partition, and the group's progress on it."""

    def __init__(self, broker: BrokerClient, partition_id: int) -> None:
        self._broker = broker
        self._partition_id = partition_id

    async def group(self) -> GroupStatus:
        (group,) = (await self._broker.control(endpoints.PARTITION, id=self._partition_id)).groups
        return group

    async def until(self, *, cursor: int = 0, acked_above: int = 0) -> None:
        """Wait until the group's cursor is at `cursor`."""
        async with asyncio.timeout(60):
            while True:
                group = await self.group()
                if group.cursor >= cursor and group.acked_above >= acked_above:
                    return
                await asyncio.sleep(0.05)


@asynccontextmanager
async def filled(cluster: Cluster, name: str, slow: bytes = b"slow") -> AsyncIterator[Subject]:
    route = await cluster.create(name, partitions=1)
    async with Producer(cluster.meta) as producer:
        for number in range(PAIRS):
            producer.send(name, b"", key=slow)
            producer.send(name, b"", key=b"quick-%d" % number)
    network = HttpNetwork()
    (partition,) = route.partitions
    broker = BrokerClient(network, partition.address)
    try:
        yield Subject(broker, partition.partition_id)
    finally:
        await broker.close()
        await network.close()


class SlowKeyHandler:
    """Handle messages at once, those of the slow key only once `open` is set."""

    def __init__(self) -> None:
        self.open = asyncio.Event()
        self.quick = 0
        self.slow: list[int] = []

    async def __call__(self, message: Message) -> None:
        if message.key == b"slow":
            await self.open.wait()
            self.slow.append(message.offset)
        else:
            self.quick += 1


async def test_slow_key_is_caught_up_with_at_the_range_limit(shared_cluster: Cluster):
    """With default settings, acks of other keys wait at the range limit, and continue with the slow
    key.
    """
    handler = SlowKeyHandler()
    async with (
        filled(shared_cluster, "crowded") as subject,
        Consumer(shared_cluster.meta, subject="crowded", group="g", handler=handler),
    ):
        await eventually(lambda: handler.quick == PAIRS, seconds=60)
        await subject.until(acked_above=ACK_RANGES_MAX)
        assert (await subject.group()).cursor == 0
        handler.open.set()
        await subject.until(cursor=2 * PAIRS)
    assert handler.quick == PAIRS
    assert handler.slow == list(range(0, 2 * PAIRS, 2))


async def test_next_owner_catches_up_at_the_range_limit(shared_cluster: Cluster):
    """It begins with as many ranges as a cursor keeps; only messages that could not be acked are
    redelivered.
    """
    first, second = SlowKeyHandler(), SlowKeyHandler()
    async with filled(shared_cluster, "crowded-twice") as subject:
        async with Consumer(
            shared_cluster.meta,
            subject="crowded-twice",
            group="g",
            handler=first,
            settings=ConsumerSettings(handover_ms=100),
        ):
            await eventually(lambda: first.quick == PAIRS, seconds=60)
            await subject.until(acked_above=ACK_RANGES_MAX)
        assert (await subject.group()).holder is None, "it is released all the same"
        async with Consumer(
            shared_cluster.meta, subject="crowded-twice", group="g", handler=second
        ):
            await eventually(lambda: second.quick == PAIRS - ACK_RANGES_MAX, seconds=60)
            assert (await subject.group()).cursor == 0
            second.open.set()
            await subject.until(cursor=2 * PAIRS)
    assert first.slow == []
    assert second.slow == list(range(0, 2 * PAIRS, 2))
    assert second.quick == PAIRS - ACK_RANGES_MAX


@pytest.mark.parametrize("strategy", ["exclusive", "shared"])
async def test_acks_by_hand_of_every_second_message_first_reach_the_end(
    shared_cluster: Cluster, strategy: str
):
    """Acks above the range limit wait; acks of the messages between let the cursor rise to the
    end.
    """
    name = f"crowded-by-hand-{strategy}"
    settings = ConsumerSettings(
        consume_strategy=strategy, buffer_messages=100_000, in_flight_messages=100_000
    )
    async with (
        filled(shared_cluster, name, slow=b"") as subject,
        Consumer(shared_cluster.meta, subject=name, group="g", settings=settings) as consumer,
    ):
        taken = [await anext(consumer) for _ in range(2 * PAIRS)]
        for message in taken[1::2]:
            await message.ack()
        await subject.until(acked_above=ACK_RANGES_MAX)
        for message in taken[::2]:
            await message.ack()
        await subject.until(cursor=2 * PAIRS)
