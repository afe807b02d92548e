"""What the log of a program has of servers that are away for an hour: each trouble, and not each
try.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import AsyncExitStack

import pytest

from keylane import Consumer, Message, Producer
from keylane.protocol.errors import UnreachableError
from keylane.testing import VirtualCluster, run
from support.consumer_options import consumer_options

AWAY_S = 3_600


async def handle(_message: Message) -> None:
    """A handler of messages that are there before the outage, and behind it."""


@pytest.mark.parametrize("away", ["metaserver", "broker"])
def test_consumers_tell_a_trouble_once_when_a_server_is_away_for_an_hour(
    caplog: pytest.LogCaptureFixture, away: str
):
    """Three consumers wrote 24,000 lines an hour, at INFO, of a broker that was away."""

    async def story(cluster: VirtualCluster) -> None:
        await cluster.create_subject("orders", partitions=2)
        kinds = ({"group": "g"}, {"group": "s", "consume_strategy": "shared"}, {"broadcast": True})
        async with AsyncExitStack() as stack:
            producer = await stack.enter_async_context(Producer(cluster.address))
            for kind in kinds:
                consumer = Consumer(
                    cluster.address, **consumer_options(subject="orders", handler=handle, **kind)
                )
                await stack.enter_async_context(consumer)
            await producer.send("orders", b"before", key=b"k")
            server = cluster.metaserver if away == "metaserver" else cluster.brokers[0]
            server.kill()
            await asyncio.sleep(AWAY_S)
            server.start()
            await producer.send("orders", b"behind", key=b"k")
            await cluster.until(lambda: done(cluster))

    async def done(cluster: VirtualCluster) -> bool:
        try:
            return not await cluster.lag("orders", "g") and not await cluster.lag("orders", "s")
        except UnreachableError:  # the broker has not reported itself yet
            return False

    with caplog.at_level(logging.INFO, "keylane"):
        run(story, limit_s=2 * AWAY_S)
    assert 0 < len(caplog.records) < 150, caplog.messages[:150]
