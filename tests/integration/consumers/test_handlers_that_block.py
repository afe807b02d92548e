"""Work of handlers in a pool of processes, and what handlers in tasks and threads see of the
`contextvars` of the program and of each other.
"""

from __future__ import annotations

import asyncio
import copy
from concurrent.futures import ProcessPoolExecutor
from contextvars import ContextVar
from multiprocessing import get_context

import pytest

from keylane import ClosedError, Consumer, ConsumerSettings, Message, Producer
from support.cluster import Cluster, eventually

CUSTOMER: ContextVar[str] = ContextVar("customer", default="nobody")


async def fill(cluster: Cluster, subject: str) -> None:
    await cluster.create(subject, partitions=1)
    async with Producer(cluster.meta) as producer:
        for customer in ("anna", "bob"):
            await producer.send(subject, b"order", key=customer)


async def test_copy_of_a_message_has_its_lease_and_no_ack_in_a_pool_of_processes(
    shared_cluster: Cluster,
):
    """The message itself is acked when its handler returns."""
    await shared_cluster.create("pool", partitions=1)
    taken: list[tuple[Message, Message]] = []

    async def bill(message: Message) -> None:
        loop = asyncio.get_running_loop()
        taken.append((message, await loop.run_in_executor(pool, copy.copy, message)))

    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        async with (
            Producer(shared_cluster.meta) as producer,
            Consumer(
                shared_cluster.meta, subject="pool", group="billing", handler=bill
            ) as consumer,
        ):
            await producer.send("pool", b"3", key="anna")
            await eventually(lambda: taken)
            await eventually(lambda: consumer.lag.messages == 0)
    ((message, carried),) = taken
    assert message.lease is not None
    assert (carried.value, carried.lease) == (b"3", message.lease)
    with pytest.raises(ClosedError, match="is a copy of message 0"):
        await carried.ack()


async def test_later_handler_of_a_task_sees_what_an_earlier_one_has_set(shared_cluster: Cluster):
    """Unless that one has reset it."""
    await fill(shared_cluster, "context-task")
    seen: list[str] = []

    async def bill(message: Message) -> None:
        seen.append(CUSTOMER.get())
        token = CUSTOMER.set(message.key_text)
        if message.key_text == "carl":
            CUSTOMER.reset(token)

    async with (
        Consumer(
            shared_cluster.meta,
            subject="context-task",
            group="billing",
            handler=bill,
            settings=ConsumerSettings(concurrency=1),
        ),
        Producer(shared_cluster.meta) as producer,
    ):
        await eventually(lambda: len(seen) == 2)
        for customer in ("carl", "dora"):
            await producer.send("context-task", b"order", key=customer)
        await eventually(lambda: len(seen) == 4)
    assert seen == ["nobody", "anna", "bob", "bob"]


async def test_handler_in_a_thread_sees_what_an_earlier_one_has_set_and_nothing_of_the_program(
    shared_cluster: Cluster,
):
    await fill(shared_cluster, "context-thread")
    seen: list[str] = []

    def bill(message: Message) -> None:
        seen.append(CUSTOMER.get())
        CUSTOMER.set(message.key_text)

    token = CUSTOMER.set("somebody")
    try:
        async with Consumer(
            shared_cluster.meta,
            subject="context-thread",
            group="billing",
            handler=bill,
            settings=ConsumerSettings(threads=1),
        ):
            await eventually(lambda: len(seen) == 2)
        assert CUSTOMER.get() == "somebody"
    finally:
        CUSTOMER.reset(token)
    assert seen == ["nobody", "anna"]
