"""Every iterator goes on after a wait for its next value was cancelled, and misses none."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from keylane import Admin, Consumer, Message, Producer, Reader
from keylane.testing import VirtualCluster, run

TURNS = 20


async def taken_with_cancels(values: AsyncIterator[Any], count: int) -> list[Any]:
    """The next values, where each wait is cancelled ever later, after turns of the event loop and
    then after times.
    """
    taken: list[Any] = []
    tries = 0
    while len(taken) < count:
        waiting: asyncio.Task[Any] = asyncio.create_task(anext(values))  # type: ignore[arg-type]
        for _ in range(min(tries, TURNS)):
            await asyncio.sleep(0)
        if tries > TURNS:
            await asyncio.wait([waiting], timeout=(tries - TURNS) * 0.0002)
        waiting.cancel()
        await asyncio.wait([waiting])
        tries += 1
        if not waiting.cancelled():
            taken.append(waiting.result())
            tries = 0
    return taken


@pytest.mark.parametrize("manner", ["messages", "batches"])
def test_consumer_goes_on_when_waits_for_the_next_value_are_cancelled(manner: str):
    async def story(cluster: VirtualCluster) -> None:
        await cluster.create_subject("orders", partitions=1)
        async with (
            Producer(cluster.address) as producer,
            Consumer(cluster.address, subject="orders", group="g") as consumer,
        ):
            values: Any = consumer.batches() if manner == "batches" else aiter(consumer)
            got: list[int] = []
            for number in range(4):
                with pytest.raises(TimeoutError):
                    await asyncio.wait_for(anext(values), 3)
                await producer.send("orders", b"%d" % number, key=b"k")
                (value,) = await taken_with_cancels(values, 1)
                got.append(value.offset if isinstance(value, Message) else value.start_offset)
                await value.ack()
            assert got == list(range(4))
        with pytest.raises(StopAsyncIteration):
            await anext(values)

    run(story)


@pytest.mark.parametrize("follow", [False, True])
def test_reader_goes_on_when_waits_for_the_next_message_are_cancelled(follow: bool):
    async def story(cluster: VirtualCluster) -> None:
        await cluster.create_subject("orders", partitions=2)
        async with Producer(cluster.address) as producer:
            for number in range(40):
                await producer.send("orders", b"%d" % number, key=b"k%d" % (number % 7))
            async with Reader(cluster.address, subject="orders", follow=follow) as reader:
                taken = await taken_with_cancels(aiter(reader), 40)
                assert len({(each.partition_id, each.offset) for each in taken}) == 40

    run(story)


def test_listings_of_parked_messages_go_on_when_waits_for_the_next_row_are_cancelled():
    """A listing that ends there looks like one that has shown all."""

    async def fail(_message: Message) -> None:
        raise ValueError("no")

    async def story(cluster: VirtualCluster) -> None:
        await cluster.create_subject("orders", partitions=1)

        async def work() -> None:
            await Consumer(
                cluster.address,
                subject="orders",
                group="g",
                handler=fail,
                on_failure="park",
                tries_max=1,
            ).run()

        cluster.start(work)
        async with Producer(cluster.address) as producer, Admin(cluster.address) as admin:
            for number in range(6):
                await producer.send("orders", b"%d" % number, key=b"k%d" % number)
            while len([view async for view in admin.parked("orders", "g")]) < 6:
                await asyncio.sleep(1)
            views = await taken_with_cancels(aiter(admin.parked("orders", "g")), 6)
            assert len({view.key for view in views}) == 6
            messages = await taken_with_cancels(aiter(admin.parked_messages("orders", "g")), 6)
            assert {each.message.value for each in messages} == {b"%d" % each for each in range(6)}

    run(story)


def test_operation_is_followed_to_its_end_when_waits_for_its_next_change_are_cancelled():
    async def story(cluster: VirtualCluster) -> None:
        await cluster.create_subject("orders", partitions=1)
        async with Admin(cluster.address) as admin:
            operation = await admin.resize("orders", partitions=2)
            states = []
            changes = aiter(admin.follow(operation))
            while True:
                try:
                    states.append((await asyncio.wait_for(anext(changes), 0.01)).state)
                except TimeoutError:
                    continue
                except StopAsyncIteration:
                    break
            assert states[-1] in {"fence", "done"}

    run(story)
