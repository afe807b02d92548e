"""However a program takes its messages, one that fails too often is set aside, and redriven ones
come to it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import defaultdict
from typing import Any

import pytest

from integration.parking.test_parked_keys import FAST, brokers_of, send
from keylane import Consumer, ConsumerSettings, Message, Producer
from keylane.errors import ConfigError
from support.cluster import Cluster, eventually
from support.consumer_options import consumer_options

SETTINGS = ConsumerSettings(handler_backoff=FAST, backoff=FAST, tries_max=3)


def consumer_of(cluster: Cluster, subject: str, **given: Any) -> Consumer:
    given = {"on_failure": "park", "settings": SETTINGS} | given
    return Consumer(cluster.meta, **consumer_options(subject=subject, group="g", **given))


async def test_failing_message_of_a_batch_handler_is_parked_and_redriven(shared_cluster: Cluster):
    """In its order, by batches; other keys of its batches are handled meanwhile."""
    subject = "park-batches"
    await shared_cluster.create(subject, partitions=1)
    handled: dict[bytes, list[int]] = defaultdict(list)
    poison = {b"bad"}

    async def handle(messages: list[Message]) -> None:
        if any(message.key in poison and message.value == b"1" for message in messages):
            raise ValueError("not this one")
        for message in messages:
            handled[message.key].append(int(message.value))

    async with (
        asyncio.timeout(60),
        Producer(shared_cluster.meta) as producer,
        brokers_of(shared_cluster, subject) as brokers,
    ):
        for number in range(6):
            for key in (b"a", b"bad", b"b"):
                await send(producer, subject, key, number)
        async with consumer_of(shared_cluster, subject, batch_handler=handle):
            while await brokers.count() < 5:
                await asyncio.sleep(0.02)
            await eventually(lambda: handled[b"b"] == handled[b"a"] == list(range(6)))
            assert handled[b"bad"] == [0]
            ((_, page),) = (await brokers.parked()).items()
            assert page.keys[0].failure.kind == "ValueError"
            poison.clear()
            await brokers.redrive(b"bad")
            await send(producer, subject, b"bad", 6)
            await eventually(lambda: handled[b"bad"] == list(range(7)))
            while await brokers.parked():
                await asyncio.sleep(0.02)


@pytest.mark.parametrize("manner", ["iterated", "many"])
async def test_message_that_is_given_back_too_often_is_parked_and_redriven(
    shared_cluster: Cluster, manner: str
):
    """With those behind it, also those in hand and those that arrive; tries of an earlier consumer
    count.
    """
    subject = f"park-{manner}"
    await shared_cluster.create(subject, partitions=1)
    handled: dict[bytes, list[int]] = defaultdict(list)
    tried: list[int] = []
    poison = {b"bad"}

    async def take(message: Message) -> None:
        if message.key in poison:
            tried.append(message.attempt)
            await message.nack()
        else:
            await message.ack()
            handled[message.key].append(int(message.value))

    async def take_some(consumer: Consumer) -> None:
        if manner == "iterated":
            await take(await anext(consumer))
            return
        messages = await consumer.getmany(timeout_ms=50)
        bad = [message for message in messages if message.key in poison]
        for message in [message for message in messages if message not in bad] + bad[:1]:
            await take(message)

    async def consume(consumer: Consumer, tries: int) -> None:
        while len(tried) < tries or len(handled[b"a"]) < 3:
            await take_some(consumer)

    async with (
        asyncio.timeout(60),
        Producer(shared_cluster.meta) as producer,
        brokers_of(shared_cluster, subject) as brokers,
    ):
        for number in range(3):
            for key in (b"bad", b"a"):
                await send(producer, subject, key, number)
        async with consumer_of(shared_cluster, subject) as consumer:
            await consume(consumer, tries=1)
        handled.clear()
        handled[b"a"] = [0, 1, 2]
        async with consumer_of(shared_cluster, subject) as consumer:
            await consume(consumer, tries=3)
            # Those behind it are parked where the program would take them.
            taking = asyncio.create_task(take_some(consumer))
            while await brokers.count() < 3:
                await asyncio.sleep(0.02)
            assert tried == [1, 2, 3]
            ((_, page),) = (await brokers.parked()).items()
            assert page.keys[0].failure.kind == "nack"
            poison.clear()
            await brokers.redrive(b"bad")
            await taking
            while handled[b"bad"] != [0, 1, 2]:
                await take_some(consumer)


@pytest.mark.parametrize("manner", ["batch", "iterated"])
async def test_failing_message_of_a_shared_group_is_set_aside_alone(
    shared_cluster: Cluster, manner: str
):
    subject = f"park-shared-{manner}"
    await shared_cluster.create(subject, partitions=1)
    handled: list[int] = []

    def handle(messages: list[Message]) -> None:
        if any(message.value == b"1" for message in messages):
            raise ValueError("not this one")
        handled.extend(int(message.value) for message in messages)

    given = {"batch_handler": handle} if manner == "batch" else {}
    async with (
        asyncio.timeout(60),
        Producer(shared_cluster.meta) as producer,
        brokers_of(shared_cluster, subject) as brokers,
    ):
        await send(producer, subject, b"k", *range(4))
        async with consumer_of(
            shared_cluster, subject, consume_strategy="shared", **given
        ) as consumer:
            while manner == "iterated" and len(handled) < 3:
                message = await anext(consumer)
                if message.value == b"1":
                    await message.nack()
                else:
                    handled.append(int(message.value))
                    await message.ack()
            while manner == "iterated" and not await brokers.count():
                with contextlib.suppress(TimeoutError):  # the last one is on its way to the broker
                    await (await asyncio.wait_for(anext(consumer), 1)).nack()
            await eventually(lambda: sorted(handled) == [0, 2, 3])
            while await brokers.count() < 1:
                await asyncio.sleep(0.02)


async def test_arrow_batches_are_not_set_aside(shared_cluster: Cluster):
    """Which of their messages is wrong only the program knows."""
    await shared_cluster.create("park-arrow", partitions=1)
    async with consumer_of(shared_cluster, "park-arrow") as consumer:
        with pytest.raises(ConfigError, match="Arrow"):
            await anext(aiter(consumer.batches()))
