"""A client pays for traces only where keylane is instrumented."""

import asyncio

from keylane import Consumer, Message, Producer
from keylane.testing import VirtualCluster
from support.spans import Spans


async def test_send_stays_plain_and_the_handler_unwrapped(keylane_cluster: VirtualCluster):
    async def handle(_message: Message) -> None: ...

    await keylane_cluster.create_subject("orders")
    consumer = Consumer(keylane_cluster.address, subject="orders", group="g", handler=handle)
    async with Producer(keylane_cluster.address) as producer, consumer:
        assert producer._may_send_plain()
        assert producer._traced_sends is None
        assert consumer._last_opening.dispatcher._jobs.handler is handle


async def test_clients_are_traced_again_after_another_opening(
    keylane_cluster: VirtualCluster, spans: Spans
):
    await keylane_cluster.create_subject("orders")
    producer = Producer(keylane_cluster.address)
    async with producer:
        await producer.send("orders", b"1")
    async with producer:
        await producer.send("orders", b"2")
        await asyncio.sleep(1)
    assert len(spans.named("send orders")) == 2
