"""A closed consumer is freed, whatever it had in hand: the garbage collector does not look into
messages.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import weakref
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest

from keylane import Consumer, ConsumerSettings, Message, Producer
from keylane.consumer.session_shell import SessionShell
from keylane.testing import VirtualCluster, run
from support.consumer_options import consumer_options

MESSAGES = 200
ROUNDS = 3


async def hang(_: object) -> None:
    """A handler that closing cancels."""
    await asyncio.sleep(3_600)


async def fail(_: object) -> None:
    """A handler whose messages wait for their next try, or are set aside."""
    raise ValueError("no such customer")


class Keeper:
    """A handler that keeps its last message."""

    def __init__(self) -> None:
        self.last: Message | None = None

    async def __call__(self, message: Message) -> None:
        self.last = message


HANDLED: dict[str, Callable[[], dict[str, Any]]] = {
    "cancelled": lambda: {"handler": hang},
    "one cancelled": lambda: {"handler": hang, "concurrency": 1},
    "kept": lambda: {"handler": Keeper()},
    "batches cancelled": lambda: {"batch_handler": hang, "max_records": 10},
    "batches failing": lambda: {"batch_handler": fail, "max_records": 10},
    "failing": lambda: {"handler": fail},
    "parked": lambda: {"handler": fail, "on_failure": "park", "tries_max": 2},
    "dead": lambda: {"handler": fail, "on_failure": "dead", "tries_max": 2},
    "acked before": lambda: {"handler": hang, "ack": "before"},
    "shared cancelled": lambda: {"handler": hang, "consume_strategy": "shared"},
    "shared failing": lambda: {"handler": fail, "consume_strategy": "shared"},
}


async def iterate(consumer: Consumer) -> None:
    async for _ in consumer:
        break


async def get_many(consumer: Consumer) -> None:
    await consumer.getmany(max_records=50)


async def give_back(consumer: Consumer) -> None:
    first, second, *_ = await consumer.getmany(max_records=50)
    await second.ack()
    await first.nack(after_s=60)
    await consumer.getmany(max_records=5)


async def take_and_ack(consumer: Consumer) -> None:
    for message in await consumer.getmany(max_records=20):
        await message.ack()


async def take_batches(consumer: Consumer) -> None:
    async for _ in consumer.batches():
        break


TAKEN = {"iterated": iterate, "taken": get_many, "given back": give_back, "arrow": take_batches}


@pytest.fixture(autouse=True)
def no_log() -> Iterator[None]:
    """What tests keep of the log has messages."""
    logging.disable()
    yield
    logging.disable(logging.NOTSET)


class Freed:
    """Which of the consumers that were opened are freed."""

    def __init__(self) -> None:
        self._opened: list[weakref.ref[Consumer]] = []
        self._collect()
        self._of_others = weakref.WeakSet(self._shells())
        """What other tests of this process have left."""

    def note(self, consumer: Consumer) -> None:
        self._opened.append(weakref.ref(consumer))

    @staticmethod
    def _collect() -> None:
        # Coroutines in a cycle are closed by a first collection, and freed by the next.
        for _ in range(3):
            gc.collect()

    def left(self) -> tuple[int, int]:
        """Consumers, and what any consumer has of its partitions."""
        self._collect()
        shells = [each for each in self._shells() if each not in self._of_others]
        return sum(consumer() is not None for consumer in self._opened), len(shells)

    @staticmethod
    def _shells() -> list[SessionShell]:
        return [each for each in gc.get_objects() if isinstance(each, SessionShell)]


async def send_all(cluster: VirtualCluster) -> None:
    await cluster.create_subject("orders", partitions=2)
    async with Producer(cluster.address) as producer:
        for number in range(MESSAGES):
            producer.send("orders", b"%d" % number, key=b"%d" % (number % 20))
        await producer.flush()


async def left_after(
    cluster: VirtualCluster,
    body: Callable[[Consumer], Awaitable[object]],
    options: Callable[[], dict[str, Any]] = dict,
) -> tuple[int, int]:
    freed = Freed()

    async def use() -> None:
        async with Consumer(
            cluster.address, **consumer_options(subject="orders", group="g", **options())
        ) as consumer:
            freed.note(consumer)
            await body(consumer)

    await send_all(cluster)
    for _ in range(ROUNDS):
        await use()
        await asyncio.sleep(5)
    return freed.left()


@pytest.mark.parametrize("case", HANDLED)
def test_consumer_is_freed_when_it_closes_with_messages_at_handlers(case: str) -> None:
    async def wait(_: Consumer) -> None:
        await asyncio.sleep(3)

    def story(cluster: VirtualCluster) -> Awaitable[tuple[int, int]]:
        return left_after(cluster, wait, HANDLED[case])

    assert run(story) == (0, 0)


@pytest.mark.parametrize("case", TAKEN)
def test_consumer_is_freed_when_it_closes_with_messages_in_hand(case: str) -> None:
    def story(cluster: VirtualCluster) -> Awaitable[tuple[int, int]]:
        return left_after(cluster, TAKEN[case])

    assert run(story) == (0, 0)


def test_pull_clients_are_freed_when_a_living_consumer_loses_its_partitions() -> None:
    async def story(cluster: VirtualCluster) -> list[int]:
        await send_all(cluster)
        freed, counts = Freed(), []
        async with Consumer(cluster.address, subject="orders", group="g") as consumer:
            for _ in range(6):
                await take_and_ack(consumer)
                await consumer.suspend()
                await asyncio.sleep(1)
                counts.append(freed.left()[1])
                await consumer.resume()
        return counts

    # The consumer knows the last message that was taken, and the one that it looked at before.
    assert max(run(story)) <= 2


async def close_several(cluster: VirtualCluster) -> None:
    consumer = Consumer(cluster.address)
    for group in ("first", "second"):
        consumer.on("orders", group=group)(hang)
    async with consumer:
        await asyncio.sleep(3)


async def close_broadcast(cluster: VirtualCluster) -> None:
    async with Consumer(
        cluster.address, subject="orders", settings=ConsumerSettings(broadcast=True), handler=hang
    ):
        await asyncio.sleep(1)
        async with Producer(cluster.address) as producer:
            for number in range(20):
                producer.send("orders", b"", key=b"%d" % number)
            await producer.flush()
        await asyncio.sleep(1)


async def close_reopened(cluster: VirtualCluster) -> None:
    consumer = Consumer(cluster.address, subject="orders", group="g", handler=hang)
    for _ in range(2):
        async with consumer:
            await asyncio.sleep(3)


@pytest.mark.parametrize("close", [close_several, close_broadcast, close_reopened])
def test_consumers_of_other_kinds_are_freed_when_they_close_with_messages_at_handlers(
    close: Callable[[VirtualCluster], Awaitable[None]],
) -> None:
    async def story(cluster: VirtualCluster) -> tuple[int, int]:
        await send_all(cluster)
        for _ in range(ROUNDS):
            await close(cluster)
            await asyncio.sleep(5)
        return Freed().left()

    assert run(story) == (0, 0)
