"""What a member of a shared group has in hand is renewed, comes to nobody else meanwhile, and is
not more than it can handle.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from keylane import Admin, Consumer, ConsumerSettings, Message, Producer
from keylane.testing import VirtualCluster, run
from support.consumer_options import consumer_options

SHARED: dict[str, Any] = {"subject": "s", "group": "g", "consume_strategy": "shared"}


async def send(cluster: VirtualCluster, *values: bytes) -> None:
    async with Producer(cluster.address) as producer:
        for value in values:
            await producer.send("s", value)


async def dead_letters(cluster: VirtualCluster) -> list[tuple[int, str, int]]:
    """(messages, kind of the failure, its tries) of each."""
    async with Admin(cluster.address) as admin:
        views = [view async for view in admin.parked("s", "g", dead=True)]
    return [
        (view.messages, view.failure.kind, view.failure.attempts)
        for view in views
        if view.failure is not None
    ]


async def member(address: str, handling: LongHandlers) -> None:
    """The program of a member."""
    await Consumer(
        address, **consumer_options(handler=handling.one, on_failure="dead", tries_max=3, **SHARED)
    ).run()


class LongHandlers:
    """Handlers that take long for the messages that say so, and note when they begin."""

    def __init__(self, cluster: VirtualCluster, long_s: float = 100_000) -> None:
        self.cluster = cluster
        self.long_s = long_s
        self.begun: list[tuple[bytes, int]] = []
        """(value, attempt)"""
        self.done: list[tuple[bytes, float]] = []
        """(value, second)"""

    async def one(self, message: Message) -> None:
        self.begun.append((message.value, message.attempt))
        if message.value.startswith(b"long"):
            await asyncio.sleep(self.long_s)
        self.done.append((message.value, self.cluster.now_s))

    async def many(self, messages: list[Message]) -> None:
        for message in messages:
            await self.one(message)


@pytest.mark.parametrize("batch", [False, True], ids=["handler", "batch"])
def test_message_is_handled_once_when_its_handler_takes_longer_than_its_time_in_flight(batch: bool):
    """Also beside a member that is free, and after it the group has nothing left."""

    async def story(cluster: VirtualCluster) -> None:
        await cluster.create_subject("s", partitions=1)
        first, other = LongHandlers(cluster, 150), LongHandlers(cluster, 150)
        address = cluster.address
        given: list[dict[str, Any]] = [
            {"batch_handler": each.many, "max_records": 4} if batch else {"handler": each.one}
            for each in (first, other)
        ]
        settings = ConsumerSettings(in_flight_ms=10_000)
        async with (
            Consumer(address, **consumer_options(settings=settings, **SHARED, **given[0])),
            Consumer(address, **consumer_options(settings=settings, **SHARED, **given[1])),
        ):
            await send(cluster, b"long")
            await asyncio.sleep(200)
            await send(cluster, b"quick")
            await asyncio.sleep(60)
        begun = first.begun + other.begun
        assert sorted(begun) == [(b"long", 1), (b"quick", 1)]
        assert len(first.done + other.done) == 2

    run(story, seed=7)


def test_message_is_handled_once_when_its_broker_restarts_meanwhile():
    """The broker has forgotten what is in flight: the member that handles a message is not given it
    again.
    """

    async def story(cluster: VirtualCluster) -> None:
        await cluster.create_subject("s", partitions=1)
        handling = LongHandlers(cluster, 150)
        async with Consumer(cluster.address, **consumer_options(handler=handling.one, **SHARED)):
            await send(cluster, b"long")
            await asyncio.sleep(30)
            cluster.brokers[0].kill()
            await asyncio.sleep(5)
            cluster.brokers[0].start()
            await asyncio.sleep(200)
        assert handling.begun == [(b"long", 1)]
        assert len(handling.done) == 1

    run(story, seed=7)


def test_member_leaves_messages_to_others_when_its_workers_are_busy():
    """All that it has are its sixteen long ones; the other handles the rest at once."""

    async def story(cluster: VirtualCluster) -> None:
        await cluster.create_subject("s", partitions=1)
        busy, free = LongHandlers(cluster), LongHandlers(cluster)
        async with Consumer(cluster.address, **consumer_options(handler=busy.one, **SHARED)):
            await send(cluster, *(b"long%d" % number for number in range(16)))
            await asyncio.sleep(30)
            assert len(busy.begun) == 16
            async with Consumer(cluster.address, **consumer_options(handler=free.one, **SHARED)):
                await asyncio.sleep(10)
                began_s = cluster.now_s
                await send(cluster, *(b"quick%d" % number for number in range(300)))
                await asyncio.sleep(5)
                assert len(free.done) == 300
                assert max(at_s for _, at_s in free.done) < began_s + 5
            assert busy.done == []

    run(story, seed=7)


def test_hanging_message_takes_one_worker_and_no_more():
    async def story(cluster: VirtualCluster) -> None:
        await cluster.create_subject("s", partitions=1)
        handling = LongHandlers(cluster)
        consumer = Consumer(
            cluster.address,
            **consumer_options(
                handler=handling.one,
                on_failure="dead",
                tries_max=3,
                settings=ConsumerSettings(handler_timeout_ms=200_000),
                **SHARED,
            ),
        )
        async with consumer:
            await send(cluster, b"long")
            await asyncio.sleep(150)
            assert handling.begun == [(b"long", 1)]
            await send(cluster, *(b"quick%d" % number for number in range(50)))
            await asyncio.sleep(5)
            assert len(handling.done) == 50
            await asyncio.sleep(800)
            assert [each for each in handling.begun if each[0] == b"long"] == [
                (b"long", attempt) for attempt in (1, 2, 3)
            ]
            assert await dead_letters(cluster) == [(1, "HandlerTimeoutError", 3)]

    run(story, seed=7)


@pytest.mark.parametrize("together", [False, True], ids=["loop", "getmany"])
def test_message_in_hand_is_not_handed_out_again_while_its_program_works(together: bool):
    async def story(cluster: VirtualCluster) -> None:
        await cluster.create_subject("s", partitions=1)
        other = LongHandlers(cluster)
        async with (
            Consumer(cluster.address, **consumer_options(**SHARED)) as consumer,
            Consumer(cluster.address, **consumer_options(handler=other.one, **SHARED)) as second,
        ):
            await second.suspend()
            await send(cluster, b"a", b"b")
            if together:
                messages = []
                while len(messages) < 2:
                    messages += await consumer.getmany(max_records=2, timeout_ms=60_000)
            else:
                messages = [await anext(aiter(consumer))]
            await second.resume()
            await asyncio.sleep(150)
            await consumer.ack(messages)
            await asyncio.sleep(1)
        assert [message.attempt for message in messages] == [1] * len(messages)
        assert other.begun == ([] if together else [(b"b", 1)])

    run(story, seed=7)


def test_message_that_a_loop_passes_over_counts_as_failed_when_it_comes_again():
    """After `tries_max` times it is a dead letter, which a late ack changes nothing about; a late
    ack in time does.
    """

    async def story(cluster: VirtualCluster) -> None:
        await cluster.create_subject("s", partitions=1)
        given: list[tuple[bytes, int, float]] = []
        late: list[Message] = []
        async with Consumer(
            cluster.address, **consumer_options(on_failure="dead", tries_max=3, **SHARED)
        ) as consumer:
            await send(cluster, b"never", b"late", b"good")

            async def loop() -> None:
                async for message in consumer:
                    given.append((message.value, message.attempt, cluster.now_s))
                    if message.value == b"good":
                        await message.ack()
                    elif message.value == b"late":
                        late.append(message)

            task = asyncio.create_task(loop())
            await asyncio.sleep(55.5)
            await late[0].ack()
            await asyncio.sleep(300)
            await send(cluster, b"good")
            await asyncio.sleep(5)
            task.cancel()
        tries = [(value, attempt) for value, attempt, _ in given]
        assert [each for each in tries if each[0] == b"never"] == [
            (b"never", attempt) for attempt in (1, 2, 3)
        ]
        assert tries.count((b"late", 1)) == 1
        assert (b"late", 2) not in tries
        assert tries.count((b"good", 1)) == 2
        assert await dead_letters(cluster) == [(1, "not acked", 3)]

    run(story, seed=7)


def test_expiries_count_when_the_processes_that_handle_a_message_are_killed():
    """A message that hangs is a dead letter after three members ended with it, and good ones are
    handled beside it.
    """

    async def story(cluster: VirtualCluster) -> None:
        await cluster.create_subject("s", partitions=1)
        handlings = [LongHandlers(cluster) for _ in range(5)]
        await send(cluster, b"long", b"quick")
        for handling in handlings[:4]:
            program = cluster.start(member, cluster.address, handling)
            await asyncio.sleep(100)
            program.kill()
            await asyncio.sleep(60)
        begun = [each for handling in handlings for each in handling.begun]
        assert [each for each in begun if each[0] == b"long"] == [
            (b"long", attempt) for attempt in (1, 2, 3)
        ]
        assert await dead_letters(cluster) == [(1, "crashed", 3)]

    run(story, seed=7)
