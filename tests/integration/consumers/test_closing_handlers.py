"""Consumers that a handler or another task closes: no handler starts after the call."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from keylane import Consumer, ConsumerSettings, Message, Producer
from keylane.protocol.errors import Reason
from support.cluster import Cluster, eventually
from support.consumer_options import consumer_options
from support.raising import raises

SENT = 40


async def send(cluster: Cluster, subject: str) -> None:
    """Messages of eight keys in two partitions."""
    await cluster.create(subject, partitions=2)
    async with Producer(cluster.meta) as producer:
        messages = [(b"k%d" % (number % 8), b"%d" % number) for number in range(SENT)]
        await producer.send_all(subject, messages)


@pytest.mark.parametrize("strategy", ["exclusive", "shared"])
@pytest.mark.parametrize("concurrency", [1, 8])
@pytest.mark.parametrize("fails", [False, True])
async def test_handlers_do_not_start_after_one_of_them_has_closed_the_consumer(
    shared_cluster: Cluster, strategy: str, concurrency: int, fails: bool
):
    """Its message is acked when it returns; every other message goes to another consumer."""
    subject = f"closing-{strategy}-{concurrency}-{fails}"
    await send(shared_cluster, subject)
    started: list[str] = []
    closed = False

    async def handle(message: Message) -> None:
        nonlocal closed
        started.append("late" if closed else "early")
        if fails and message.attempt == 1 and not closed:
            raise ValueError
        await consumer.close()
        closed = True

    names: dict[str, Any] = {"subject": subject, "group": "g", "consume_strategy": strategy}
    consumer = Consumer(
        shared_cluster.meta,
        **consumer_options(
            handler=handle, settings=ConsumerSettings(concurrency=concurrency), **names
        ),
    )
    await asyncio.wait_for(consumer.run(), 60)
    assert closed
    assert "late" not in started
    handled: list[int] = []
    async with Consumer(
        shared_cluster.meta,
        **consumer_options(handler=lambda message: handled.append(int(message.value)), **names),
    ):
        acked = 1 if concurrency == 1 else 2 * concurrency
        await eventually(lambda: SENT - acked <= len(handled), seconds=60)
    assert len(set(handled)) < SENT


async def test_iteration_gets_no_message_after_another_task_has_called_close(
    shared_cluster: Cluster,
):
    await send(shared_cluster, "closing-iteration")
    taken: list[Message] = []
    closed: list[int] = []

    async def iterate(consumer: Consumer) -> None:
        async for message in consumer:
            taken.append(message)
            await message.ack()
            await asyncio.sleep(0)

    async with Consumer(shared_cluster.meta, subject="closing-iteration", group="g") as consumer:
        iterating = asyncio.create_task(iterate(consumer))
        await eventually(lambda: taken)
        closing = asyncio.create_task(consumer.close())
        await asyncio.sleep(0)
        closed.append(len(taken))
        await closing
        await asyncio.wait_for(iterating, 30)
    assert len(taken) == closed[0]


@pytest.mark.parametrize("strategy", ["exclusive", "shared"])
async def test_message_of_a_key_is_refused_to_a_second_task_before_the_ack(
    shared_cluster: Cluster, strategy: str
):
    """The first task continues, and handles every message in order."""
    subject = f"two-tasks-{strategy}"
    await shared_cluster.create(subject, partitions=1)
    async with Producer(shared_cluster.meta) as producer:
        await producer.send_all(subject, [(b"k", b"%d" % number) for number in range(4)])
    handled: list[bytes] = []

    async def iterate(consumer: Consumer) -> None:
        async for message in consumer:
            await asyncio.sleep(0.05)
            await message.ack()
            handled.append(message.value)

    async with Consumer(
        shared_cluster.meta,
        subject=subject,
        group="g",
        settings=ConsumerSettings(consume_strategy=strategy),
    ) as consumer:
        tasks = [asyncio.create_task(iterate(consumer)) for _ in range(2)]
        await eventually(lambda: len(handled) == 4, seconds=60)
        with raises(Reason.OTHER_TASK):
            await tasks[1]
    await asyncio.wait_for(tasks[0], 30)
    assert handled == [b"0", b"1", b"2", b"3"]
