"""Consumers without a partition ask rarely, and are served in the order in which they joined."""

from __future__ import annotations

import asyncio
from typing import Any

from keylane import Consumer
from keylane.consumer import ConsumerSettings
from keylane.rpc.environment import Environment
from keylane.rpc.http_network import HttpNetwork
from support.cluster import Cluster, eventually

TTL_MS = 1_500
WAITED_S = 3.0


class CountingNetwork:
    """A real network that counts what is asked of it."""

    def __init__(self) -> None:
        self._real = HttpNetwork()
        self.calls = 0
        self.channels = 0

    async def control(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        return await self._real.control(*args, **kwargs)

    async def open_channel(self, *args: Any, **kwargs: Any) -> Any:
        self.channels += 1
        return await self._real.open_channel(*args, **kwargs)

    async def close(self) -> None:
        await self._real.close()


async def test_waiting_consumers_ask_seldom_and_are_served_in_turn(
    shared_cluster: Cluster,
):
    """While another consumer owns the only partition: a heartbeat for each third of the ttl, no
    call to the broker.
    """
    await shared_cluster.create("queue-up", partitions=1)
    networks = [CountingNetwork() for _ in range(3)]
    consumers = [
        Consumer(
            shared_cluster.meta,
            subject="queue-up",
            group="g",
            handler=lambda _message: None,
            settings=ConsumerSettings(ttl_ms=TTL_MS),
            _environment=Environment(network=network),
        )
        for network in networks
    ]
    try:
        for consumer in consumers:
            await consumer.__aenter__()
        holder, *waiting = consumers
        await eventually(lambda: len(holder.assignment) == 1)
        before = [network.calls for network in networks]
        await asyncio.sleep(WAITED_S)
        asked = [network.calls - count for network, count in zip(networks, before, strict=True)]
        # Three times the beats that fit, so that a slow machine cannot fail it; a loop would ask
        # thousands of times.
        assert max(asked) <= 3 * (WAITED_S * 1000 / (TTL_MS / 3) + 1)
        assert [network.channels for network in networks[1:]] == [0, 0]
        await holder.close()
        await eventually(lambda: len(waiting[0].assignment) == 1)
        assert waiting[1].assignment == []
        await waiting[0].close()
        await eventually(lambda: len(waiting[1].assignment) == 1)
    finally:
        for consumer in consumers:
            await consumer.close()
        for network in networks:
            await network.close()
