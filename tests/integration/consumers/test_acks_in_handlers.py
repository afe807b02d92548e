"""A handler acks by its return: acks and returns by hand are refused there, and nothing changes by
them.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from keylane import Admin, Consumer, ConsumerSettings, InvalidRequestError, Message, Producer
from keylane.testing import VirtualCluster, run


@pytest.mark.parametrize("strategy", ["exclusive", "shared"])
@pytest.mark.parametrize("kind", ["handler", "batch_handler"])
@pytest.mark.parametrize("call", ["ack", "nack", "consumer.ack", "consumer.nack"])
def test_call_by_hand_is_refused_when_a_handler_has_the_message(
    call: str, kind: str, strategy: str
):
    refused: list[InvalidRequestError] = []
    tries: list[int] = []

    async def story(cluster: VirtualCluster) -> None:
        await cluster.create_subject("orders", partitions=1)
        calls: dict[str, Any] = {
            "ack": lambda message: message.ack(),
            "nack": lambda message: message.nack(),
            "consumer.ack": lambda message: consumer.ack([message]),
            "consumer.nack": lambda message: consumer.nack([message]),
        }

        async def handle(given: Message | list[Message]) -> None:
            message = given[0] if isinstance(given, list) else given
            tries.append(message.attempt)
            try:
                await calls[call](message)
            except InvalidRequestError as error:
                refused.append(error)

        handling: dict[str, Any] = {kind: handle}
        consumer = Consumer(
            cluster.address,
            subject="orders",
            group="g",
            settings=ConsumerSettings(consume_strategy=strategy),
            **handling,
        )
        async with Producer(cluster.address) as producer, consumer:
            await producer.send("orders", b"", key=b"k")
            async with Admin(cluster.address) as admin:
                while not tries or await admin.lag("orders", "g"):
                    await asyncio.sleep(1)

    run(story)
    assert tries == [1]
    (error,) = refused
    assert "was given to a handler, whose return acks it" in error.message
    assert "keylane.Retry" in error.hint


@pytest.mark.parametrize("strategy", ["exclusive", "shared"])
@pytest.mark.parametrize("call", ["ack", "nack", "consumer.ack", "consumer.nack"])
def test_call_by_hand_is_refused_when_the_handler_does_not_wait_for_it(call: str, strategy: str):
    """As in a handler that is no coroutine, which cannot wait."""
    refused: list[InvalidRequestError] = []

    async def story(cluster: VirtualCluster) -> None:
        await cluster.create_subject("orders", partitions=1)
        calls: dict[str, Any] = {
            "ack": lambda message: message.ack(),
            "nack": lambda message: message.nack(),
            "consumer.ack": lambda message: consumer.ack([message]),
            "consumer.nack": lambda message: consumer.nack([message]),
        }

        def handle(message: Message) -> None:
            try:
                calls[call](message)
            except InvalidRequestError as error:
                refused.append(error)

        consumer = Consumer(
            cluster.address,
            subject="orders",
            group="g",
            settings=ConsumerSettings(consume_strategy=strategy),
            handler=handle,
        )
        async with Producer(cluster.address) as producer, consumer:
            await producer.send("orders", b"", key=b"k")
            async with Admin(cluster.address) as admin:
                while not refused or await admin.lag("orders", "g"):
                    await asyncio.sleep(1)

    run(story)
    (error,) = refused
    assert "was given to a handler, whose return acks it" in error.message
