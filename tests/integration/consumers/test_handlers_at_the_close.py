"""A handler that runs while its consumer closes has `handover_ms`, whatever the ttl, and what
becomes of it is logged.
"""

from __future__ import annotations

import asyncio
import logging

import pytest

from keylane import Consumer, ConsumerSettings, Message, Producer
from keylane.testing import VirtualCluster, run

HANDOVER_MS = 5_000


@pytest.mark.parametrize("ttl_ms", [1_000, 3_000, 6_000, 30_000])
def test_handler_has_the_time_of_the_hand_over_when_the_consumer_closes(
    ttl_ms: int, caplog: pytest.LogCaptureFixture
):
    """A short lease is renewed meanwhile; one that is not ends the handler earlier."""

    async def story(cluster: VirtualCluster) -> float:
        await cluster.create_subject("orders", partitions=1)
        started = asyncio.Event()

        async def handle(_message: Message) -> None:
            started.set()
            await asyncio.sleep(20)

        async with Producer(cluster.address) as producer:
            await producer.send("orders", b"v", key=b"k")
        settings = ConsumerSettings(ttl_ms=ttl_ms, handover_ms=HANDOVER_MS)
        async with Consumer(
            cluster.address, subject="orders", group="g", handler=handle, settings=settings
        ) as consumer:
            await started.wait()
            await asyncio.sleep(2)
            began_s = cluster.now_s
            await consumer.close()
            return cluster.now_s - began_s

    with caplog.at_level(logging.INFO, "keylane.consumer"):
        closed_s = run(story)
    assert 5.0 <= closed_s < 5.5
    waits, cancelled = caplog.messages[-2:]
    assert "it cancels them 5.0 s after the close began" in waits
    assert cancelled.startswith("handler of orders partition 1 offset 0 in group g (key digest ")
    assert cancelled.endswith(
        "was cancelled, because its lease has ended or its partition is handed over; "
        "the next owner handles it again"
    )
