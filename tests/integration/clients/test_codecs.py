"""Values that a codec encodes at the producer and decodes at consumers and readers, on real
servers.
"""

from __future__ import annotations

import asyncio
import logging

import msgspec
import pytest

from keylane import CodecError, Consumer, JsonCodec, Message, Producer, QueueReader
from keylane.consumer import ConsumerSettings
from keylane.protocol.backoff import Backoff
from support.cluster import Cluster, eventually


class CodecOrder(msgspec.Struct, frozen=True):
    number: int
    customer: str


ORDERS = JsonCodec(CodecOrder)
SENT = [CodecOrder(number, f"c-{number % 5}") for number in range(100)]


async def send(cluster: Cluster, subject: str) -> None:
    async with Producer(cluster.meta, codec=ORDERS) as producer:
        for order in SENT:
            producer.send(subject, order, key=order.customer.encode())


@pytest.mark.parametrize("strategy", ["exclusive", "shared"])
async def test_handler_decodes_values_of_the_sender(shared_cluster: Cluster, strategy: str):
    subject = f"decoded-{strategy}"
    await shared_cluster.create(subject, partitions=2)
    await send(shared_cluster, subject)
    decoded: list[CodecOrder] = []

    async def handle(message: Message[CodecOrder]) -> None:
        decoded.append(message.decode())

    async with Consumer(
        shared_cluster.meta,
        subject=subject,
        group="g",
        handler=handle,
        codec=ORDERS,
        settings=ConsumerSettings(consume_strategy=strategy),
    ):
        await eventually(lambda: len(decoded) >= len(SENT))
    assert sorted(decoded, key=lambda order: order.number) == SENT


async def test_message_is_tried_again_when_it_cannot_be_decoded(
    shared_cluster: Cluster, caplog: pytest.LogCaptureFixture
):
    """Its key waits, and is told of in the log; every other key is handled, and its own too once
    decoding succeeds.
    """
    subject = "undecodable"
    await shared_cluster.create(subject, partitions=2)
    async with Producer(shared_cluster.meta) as producer:
        producer.send(subject, b"{}", key=b"c-0")
    await send(shared_cluster, subject)
    mended = False
    decoded: list[CodecOrder] = []

    def handle(message: Message[CodecOrder]) -> None:
        if mended and message.value == b"{}":
            return
        decoded.append(message.decode())

    settings = ConsumerSettings(handler_backoff=Backoff(first_ms=50, max_ms=100))
    with caplog.at_level(logging.WARNING):
        async with Consumer(
            shared_cluster.meta,
            subject=subject,
            group="g",
            handler=handle,
            codec=ORDERS,
            settings=settings,
        ):
            await eventually(lambda: len(decoded) >= len(SENT) * 4 // 5)
            assert {order.customer for order in decoded} == {"c-1", "c-2", "c-3", "c-4"}
            await eventually(lambda: "failed with CodecError" in caplog.text)
            mended = True
            await eventually(lambda: len(decoded) == len(SENT))
    assert [order.number for order in decoded if order.customer == "c-0"] == list(range(0, 100, 5))


async def test_iteration_raises_the_error_where_the_program_decodes(shared_cluster: Cluster):
    """The program decides: it acks the message that it cannot read, and takes the next."""
    subject = "decoded-by-loop"
    await shared_cluster.create(subject, partitions=1)
    async with Producer(shared_cluster.meta) as producer:
        await producer.send(subject, b"no JSON")
    await send(shared_cluster, subject)
    refused, decoded = [], []
    async with (
        asyncio.timeout(30),
        Consumer(shared_cluster.meta, subject=subject, group="g", codec=ORDERS) as consumer,
    ):
        async for message in consumer:
            try:
                decoded.append(message.decode())
            except CodecError as error:
                refused.append((error.offset, message.value))
            await message.ack()
            if len(decoded) == len(SENT):
                break
    assert refused == [(0, b"no JSON")]
    assert decoded == SENT


async def test_queue_reader_decodes_what_it_reads(shared_cluster: Cluster):
    subject = "decoded-queue"
    await shared_cluster.create(subject, partitions=1, static=True)
    await send(shared_cluster, subject)
    async with QueueReader(shared_cluster.meta, subject=subject, codec=ORDERS) as reader:
        part = await reader.read(0, 0)
    assert [message.decode() for message in part.messages] == SENT[: len(part.messages)]
    assert part.messages
