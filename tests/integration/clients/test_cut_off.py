"""Consumers cut off from one of their two networks: no partition gets stuck, no handler runs for
too long.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

from keylane import Consumer, Message, Producer
from keylane.consumer import ConsumerSettings
from keylane.protocol.errors import NotSentError
from keylane.rpc.environment import Environment
from keylane.rpc.http_network import HttpNetwork
from support.cluster import Cluster, eventually

TTL_MS = 1_500
SETTINGS = ConsumerSettings(ttl_ms=TTL_MS, concurrency=4)


class CutNetwork:
    """A real network whose control calls fail once `cut` is set; open channels to brokers go on."""

    def __init__(self) -> None:
        self._real = HttpNetwork()
        self.cut = False

    async def control(self, *args: Any, **kwargs: Any) -> Any:
        if self.cut:
            raise NotSentError("cut off")
        return await self._real.control(*args, **kwargs)

    async def open_channel(self, *args: Any, **kwargs: Any) -> Any:
        return await self._real.open_channel(*args, **kwargs)

    async def close(self) -> None:
        await self._real.close()


async def fill(cluster: Cluster, subject: str, count: int) -> list[bytes]:
    await cluster.create(subject, partitions=1)
    values = [b"%d" % number for number in range(count)]
    async with Producer(cluster.meta) as producer:
        for value in values:
            producer.send(subject, value, key=b"k")
    return values


async def test_consumer_loses_its_partitions_when_it_is_cut_off_from_the_metaserver(
    shared_cluster: Cluster,
):
    """It still reaches the broker, and yet the next owner has the partition within a ttl and
    detection.
    """
    values = await fill(shared_cluster, "cut-from-meta", 400)
    network = CutNetwork()
    handled: dict[str, list[tuple[float, Message]]] = {"cut": [], "next": []}

    def consumer(name: str, **more: Any) -> Consumer:
        async def handle(message: Message) -> None:
            handled[name].append((time.monotonic(), message))
            await asyncio.sleep(0.01)

        return Consumer(
            shared_cluster.meta,
            subject="cut-from-meta",
            group="g",
            handler=handle,
            settings=SETTINGS,
            **more,
        )

    async with consumer("cut", _environment=Environment(network=network)), consumer("next"):
        await eventually(lambda: len(handled["cut"]) > 20)
        network.cut = True
        cut = time.monotonic()
        await eventually(lambda: handled["next"], seconds=60)
        await eventually(lambda: handled["next"][-1][1].value == values[-1], seconds=60)
    await network.close()
    assert handled["cut"][-1][0] < handled["next"][0][0], "no two owners at once"
    # Its lease, until it hears that another owner waits.
    assert handled["cut"][-1][0] - cut < 1.5 * TTL_MS / 1000
    first = handled["next"][0][1]
    assert first.fencing_token > handled["cut"][0][1].fencing_token
    following = [message.value for _, message in handled["next"]]
    assert following == values[-len(following) :], "it continues where the acks ended, in order"
    assert {message.value for each in handled.values() for _, message in each} == set(values)


async def test_handler_that_outlives_its_lease_is_cancelled(shared_cluster: Cluster):
    """Cut off from the metaserver, its consumer cancels it before the lease ends; the next owner
    gets the message.
    """
    await fill(shared_cluster, "cancelled", 1)
    network = CutNetwork()
    cancelled: list[float] = []
    again: list[Message] = []

    async def endless(_message: Message) -> None:
        network.cut = True
        began = time.monotonic()
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.append(time.monotonic() - began)
            raise

    def consumer(**more: Any) -> Consumer:
        return Consumer(
            shared_cluster.meta, subject="cancelled", group="g", settings=SETTINGS, **more
        )

    async with consumer(handler=endless, _environment=Environment(network=network)):
        await eventually(lambda: network.cut, seconds=60)
        async with consumer(handler=again.append):
            await eventually(lambda: again, seconds=60)
    await network.close()
    assert len(cancelled) == 1
    assert cancelled[0] < 2 * TTL_MS / 1000
    assert [message.value for message in again] == [b"0"]
    assert again[0].fencing_token > 1


async def test_handler_may_take_longer_than_the_lease(shared_cluster: Cluster):
    """While heartbeats are answered it is neither cancelled nor started a second time."""
    patient = ConsumerSettings(ttl_ms=2 * TTL_MS, concurrency=4)  # a loaded machine may be slow
    await fill(shared_cluster, "long-handler", 2)
    starts: list[bytes] = []
    ends: list[bytes] = []

    async def handle(message: Message) -> None:
        starts.append(message.value)
        await asyncio.sleep(3 * TTL_MS / 1000)
        ends.append(message.value)

    def consumer(**more: Any) -> Consumer:
        return Consumer(
            shared_cluster.meta, subject="long-handler", group="g", settings=patient, **more
        )

    async with consumer(handler=handle), consumer(handler=handle):
        await eventually(lambda: len(ends) == 2, seconds=60)
    assert starts == ends == [b"0", b"1"]
