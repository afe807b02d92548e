"""Handlers that do not return, and messages that a program holds, are reported to brokers."""

from __future__ import annotations

import asyncio

from keylane import Message
from keylane.consumer.dispatch.workers import WorkerPool
from keylane.protocol.parked import HANGS_MS
from support.handling import Client, in_virtual_time, virtual_loop, workers_of

HUNG = "its handler has not returned"


async def watch(workers: WorkerPool) -> None:
    while True:
        await asyncio.sleep(1)
        workers.check_long_running()


def test_handler_that_does_not_return_is_told_at_every_look():
    """After ten seconds, until it returns; a quick handler beside it is never reported."""
    loop, machine = virtual_loop()
    client = Client()

    async def handle(message: Message) -> None:
        await asyncio.sleep(14.5 if message.key == b"slow" else 1)

    async def story() -> None:
        workers = workers_of(handle, concurrency=2, clock=machine)
        watching = asyncio.create_task(watch(workers))
        client.give(workers, b"slow", *[b"quick"] * 30)
        while len(client.handled) < 31:
            await asyncio.sleep(1)
        watching.cancel()
        await workers.close()

    in_virtual_time(story(), loop)
    assert client.hanging
    assert {told[:3] for told in client.hanging} == {(0, HUNG, 0)}
    times = [running_ms for *_, running_ms in client.hanging]
    assert HANGS_MS <= times[0] < HANGS_MS + 1_100
    assert times == sorted(times)
    assert 3 <= len(times) <= 5


def test_hanging_second_try_counts_the_failed_one_before():
    loop, machine = virtual_loop()
    client = Client()

    async def handle(message: Message) -> None:
        if message.attempt == 1:
            raise ValueError
        await asyncio.sleep(12)

    async def story() -> None:
        workers = workers_of(handle, clock=machine)
        watching = asyncio.create_task(watch(workers))
        client.give(workers, b"k")
        while not client.handled:
            await asyncio.sleep(1)
        watching.cancel()
        await workers.close()

    in_virtual_time(story(), loop)
    assert {told[:3] for told in client.hanging} == {(0, HUNG, 1)}


def test_batch_that_hangs_is_told_by_its_first_message():
    loop, machine = virtual_loop()
    client = Client()

    async def handle(_batch: list[Message]) -> None:
        await asyncio.sleep(12)

    async def story() -> None:
        workers = workers_of(handle, batched=True, clock=machine, max_records=8)
        watching = asyncio.create_task(watch(workers))
        client.give(workers, b"a", b"b", b"c", start=5)
        while not client.handled:
            await asyncio.sleep(1)
        watching.cancel()
        await workers.close()

    in_virtual_time(story(), loop)
    assert {told[:3] for told in client.hanging} == {
        (5, "the handler of its batch of 3 messages has not returned", 0)
    }
