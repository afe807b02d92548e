"""Clients that are opened while there is no metaserver: told at once, and none the worse for it."""

from __future__ import annotations

from pathlib import Path

import pytest

from keylane import Consumer, Message, Producer
from keylane.protocol.errors import NotSentError
from support.cluster import Cluster, eventually


async def test_a_client_that_could_not_be_opened_may_be_opened_again(tmp_path: Path):
    """While the metaserver restarts nothing waits: the error says that nothing was done, and the next opening works."""
    cluster = Cluster(tmp_path, 1)
    handled: list[Message] = []
    try:
        await cluster.create("s", partitions=1)
        producer = Producer(cluster.meta)
        consumer = Consumer(cluster.meta, subject="s", group="g", handler=handled.append)
        cluster.meta_program.kill()
        for client in (producer, consumer):
            with pytest.raises(NotSentError):
                await client.__aenter__()
        with pytest.raises(NotSentError):
            await consumer.run()
        cluster.meta_program.restart()
        async with producer, consumer:
            await producer.send("s", b"v", key=b"k")
            await eventually(lambda: handled)
    finally:
        cluster.stop()
