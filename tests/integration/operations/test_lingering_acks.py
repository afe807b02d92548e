"""Acks that linger for long: who waits for the end of a partition does not wait for their
linger.
"""

from __future__ import annotations

import pytest

from keylane import Admin, Consumer, ConsumerSettings, Message, Producer
from keylane.testing import VirtualCluster, run

LINGERS = ConsumerSettings(ack_linger_ms=10_000)


@pytest.mark.parametrize("handled_first", [True, False])
def test_children_do_not_wait_for_lingering_acks_when_their_parent_is_handled(handled_first: bool):
    """Of a resize before which all was handled, and of one after which messages of the parent
    come.
    """

    async def story(cluster: VirtualCluster) -> None:
        await cluster.create_subject("orders", partitions=1)
        handled: list[bytes] = []

        async def consume() -> None:
            async def handle(message: Message) -> None:
                handled.append(message.value)

            consumer = Consumer(
                cluster.address, subject="orders", group="g", handler=handle, settings=LINGERS
            )
            await consumer.run()

        async def send(value: bytes) -> None:
            async with Producer(cluster.address) as producer:
                await producer.send("orders", value, key=b"k")

        if handled_first:
            cluster.start(consume)
        await send(b"of the parent")
        if handled_first:
            await cluster.until(lambda: handled)
        async with Admin(cluster.address) as admin:
            await admin.resize("orders", 4)
        if not handled_first:
            cluster.start(consume)
        await send(b"of a child")
        began_s = cluster.now_s
        await cluster.until(lambda: len(handled) == 2)
        assert handled == [b"of the parent", b"of a child"]
        assert cluster.now_s - began_s < LINGERS.ack_linger_ms / 4_000

    run(story)
