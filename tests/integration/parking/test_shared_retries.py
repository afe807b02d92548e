"""Messages of a shared group that fail: tried again alone, ever later, by whichever consumer, and
then a dead letter.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable

import pytest

from keylane import Admin, Consumer, ConsumerSettings, Message, Producer
from keylane.protocol.backoff import Backoff
from keylane.testing import VirtualCluster, run

Tried = list[tuple[str, bytes, int, float]]
"""(consumer, value, attempt, virtual second) of each try."""


def settings(first_s: float, *, tries: int, in_flight_ms: int = 30_000) -> ConsumerSettings:
    pause = Backoff(first_ms=int(first_s * 1000), max_ms=int(first_s * 8000))
    return ConsumerSettings(
        consume_strategy="shared",
        on_failure="retry",
        retry_tries_max=tries,
        retry_backoff=pause,
        in_flight_ms=in_flight_ms,
    )


def failing_for_bad(cluster: VirtualCluster, tried: Tried, name: str) -> Callable[[Message], None]:
    def handle(message: Message) -> None:
        tried.append((name, message.value, message.attempt, cluster.now_s))
        if message.value.startswith(b"bad"):
            raise ValueError("no such customer")

    return handle


async def consume(
    address: str, chosen: ConsumerSettings, handle: Callable[[Message], None]
) -> None:
    """The program of a member of the group."""
    await Consumer(address, subject="orders", group="g", settings=chosen, handler=handle).run()


async def send(cluster: VirtualCluster, *values: bytes) -> None:
    async with Producer(cluster.address) as producer:
        for value in values:
            await producer.send("orders", value, key=b"k")


async def dead_letters(cluster: VirtualCluster) -> list[tuple[int, str, int]]:
    """(messages, kind of the failure, its tries) of each."""
    async with Admin(cluster.address) as admin:
        views = [view async for view in admin.parked("orders", "g", key=None)]
    return [
        (view.messages, view.failure.kind, view.failure.attempts)
        for view in views
        if view.failure is not None
    ]


def story_of(body: Callable[[VirtualCluster], Awaitable[None]]) -> None:
    async def story(cluster: VirtualCluster) -> None:
        await cluster.create_subject("orders", partitions=1)
        await body(cluster)

    run(story)


def test_failing_message_waits_alone_and_is_a_dead_letter_after_its_tries():
    """Later messages of its key are handled at once; the pauses grow; the group drains."""

    async def body(cluster: VirtualCluster) -> None:
        tried: Tried = []
        handle = failing_for_bad(cluster, tried, "a")
        cluster.start(consume, cluster.address, settings(1, tries=4), handle)
        await send(cluster, b"bad", b"1", b"2")
        await asyncio.sleep(0.5)
        assert [each[1:3] for each in tried] == [(b"bad", 1), (b"1", 1), (b"2", 1)]
        await cluster.until(lambda: dead_letters(cluster))
        assert await dead_letters(cluster) == [(1, "ValueError", 4)]
        bad = [(attempt, at_s) for _, value, attempt, at_s in tried if value == b"bad"]
        assert [attempt for attempt, _ in bad] == [1, 2, 3, 4]
        pauses = [after - before for (_, before), (_, after) in itertools.pairwise(bad)]
        assert pauses == sorted(pauses)
        assert pauses[0] >= 0.4

        async def is_drained() -> bool:
            return await cluster.lag("orders", "g") == 0

        await cluster.until(is_drained)

    story_of(body)


def test_tries_count_on_at_another_consumer():
    """One pauses for longer than a message may be in flight, so that any of two gets it again; a
    third is killed meanwhile.
    """

    async def body(cluster: VirtualCluster) -> None:
        tried: Tried = []
        chosen = settings(60, tries=6, in_flight_ms=5_000)
        programs = [
            cluster.start(
                consume, cluster.address, chosen, failing_for_bad(cluster, tried, f"c{number}")
            )
            for number in range(3)
        ]
        await send(cluster, b"bad")
        await cluster.until(lambda: len(tried) >= 2)
        await asyncio.sleep(0.1)  # the try is told with an ack; one that is not told is made again
        names = [f"c{number}" for number in range(3)]
        programs[names.index(tried[-1][0])].kill()
        await cluster.until(lambda: dead_letters(cluster))
        attempts = [attempt for _, _, attempt, _ in tried]
        assert attempts == [1, 2, 3, 4, 5, 6]
        assert len({name for name, *_ in tried}) > 1
        assert await dead_letters(cluster) == [(1, "ValueError", 6)]

    story_of(body)


@pytest.mark.parametrize("order_strategy", ["strict", "best_tried"])
def test_retry_is_stored_for_a_shared_group(order_strategy: str):
    """Of a subject of either kind: a shared group has no order to keep."""

    async def story(cluster: VirtualCluster) -> None:
        await cluster.create_subject("orders", partitions=1, order_strategy=order_strategy)
        tried: Tried = []
        quick = Backoff(first_ms=10, max_ms=10)
        blocks = ConsumerSettings(consume_strategy="shared", handler_backoff=quick)
        cluster.start(consume, cluster.address, blocks, failing_for_bad(cluster, tried, "a"))
        await send(cluster, b"bad")
        await cluster.until(lambda: len(tried) > 20)
        async with Admin(cluster.address) as admin:
            await admin.set_group("orders", "g", on_failure="retry", tries_max=3)
        await cluster.until(lambda: dead_letters(cluster))

    run(story)


def test_dead_letters_are_handled_again_by_one_consumer_of_the_group():
    """When it is killed meanwhile another one goes on."""

    async def body(cluster: VirtualCluster) -> None:
        tried: Tried = []
        is_open = False
        chosen = ConsumerSettings(consume_strategy="shared", on_failure="dead", tries_max=1)

        def handler(name: str) -> Callable[[Message], Awaitable[None]]:
            async def handle(message: Message) -> None:
                tried.append((name, message.value, message.attempt, cluster.now_s))
                if not is_open:
                    raise ValueError("closed")
                await asyncio.sleep(20)

            return handle

        names = ["a", "b", "c"]
        programs = [
            cluster.start(consume, cluster.address, chosen, handler(name)) for name in names
        ]
        values = [b"%d" % number for number in range(200)]
        await send(cluster, *values)

        async def parked() -> int:
            return sum(view.messages for view in await cluster.parked("orders", "g"))

        async def all_parked() -> bool:
            return await parked() == len(values)

        await cluster.until(all_parked)
        tried.clear()
        is_open = True
        async with Admin(cluster.address) as admin:
            await admin.redrive("orders", "g", all=True)
        await cluster.until(lambda: tried)
        await asyncio.sleep(10)
        (first,) = {name for name, *_ in tried}
        assert len({value for _, value, *_ in tried}) == len(tried)
        programs[names.index(first)].kill()

        async def none_parked() -> bool:
            return await parked() == 0

        await cluster.until(lambda: {value for _, value, *_ in tried} == set(values), within_s=900)
        await cluster.until(none_parked)
        again = [value for name, value, *_ in tried if name != first]
        assert len({name for name, *_ in tried}) == 2
        assert len(set(again)) == len(again), "each once, but for what the killed one had"

    story_of(body)
