"""`ack="each"` beside more gaps than a cursor keeps: an ack that the broker refuses is never
reported as done.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from keylane import Admin, Consumer, ConsumerSettings, Message, OverloadedError, Producer
from keylane.broker.partition import acks
from keylane.testing import VirtualCluster, run
from support.consumer_options import consumer_options

RANGES_MAX = 20
KEYS = 5
PAIRS = 150


@pytest.fixture(autouse=True)
def few_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(acks, "ACK_RANGES_MAX", RANGES_MAX)


async def fill(cluster: VirtualCluster, *, keyless: bool = False) -> None:
    """Messages of a bad key, each followed by one of another key, or of none: no two of the others
    are neighbours.
    """
    await cluster.create_subject("orders", partitions=1)
    async with Producer(cluster.address) as producer:
        for index in range(PAIRS):
            producer.send("orders", b"", key=b"bad")
            key = b"" if keyless else b"good-%d" % (index % KEYS)
            producer.send("orders", b"", key=key)


class FailingHandler:
    """Handles messages, alone or in batches, and fails for the bad key until `mended` is set."""

    def __init__(self) -> None:
        self.handled: list[tuple[bytes, int]] = []
        self.mended = False

    async def one(self, message: Message) -> None:
        if message.key == b"bad" and not self.mended:
            raise ValueError("no")
        self.handled.append((message.key, message.offset))

    async def batch(self, messages: list[Message]) -> None:
        for message in messages:
            await self.one(message)


async def until_still(handled: list[tuple[bytes, int]]) -> None:
    """Wait until some are handled, and no more come."""
    before = -1
    while not handled or before != len(handled):
        before = len(handled)
        await asyncio.sleep(5)


def story_of(
    work_of: FailingHandler, *, keyless: bool = False, **given: Any
) -> Callable[[VirtualCluster], Awaitable[Counter[tuple[bytes, int]]]]:
    """A consumer is killed at the limit, and another one goes on; returns what both handled."""

    async def story(cluster: VirtualCluster) -> Counter[tuple[bytes, int]]:
        await fill(cluster, keyless=keyless)

        async def work() -> None:
            settings = ConsumerSettings(ack="each", ttl_ms=2_000, concurrency=4)
            await Consumer(
                cluster.address,
                **consumer_options(subject="orders", group="g", settings=settings, **given),
            ).run()

        program = cluster.start(work)
        await until_still(work_of.handled)
        program.kill()
        await asyncio.sleep(5)
        cluster.start(work)
        await asyncio.sleep(20)
        work_of.mended = True
        async with Admin(cluster.address) as admin:
            while await admin.lag("orders", "g"):
                await asyncio.sleep(1)
        return Counter(work_of.handled)

    return story


@pytest.mark.parametrize("kind", ["handler", "batch_handler"])
def test_killed_handler_repeats_one_message_of_a_key_at_most_when_acks_are_refused(kind: str):
    """Behind the failing key there are more gaps than the cursor keeps; once it is mended all are
    handled, in order.
    """
    handler = FailingHandler()
    given: dict[str, Any] = (
        {"handler": handler.one}
        if kind == "handler"
        else {"batch_handler": handler.batch, "max_records": 1}
    )
    counts = run(story_of(handler, **given))
    assert len(counts) == 2 * PAIRS
    again = Counter(key for (key, _), count in counts.items() if count > 1)
    assert max(again.values(), default=0) <= 1, "of each key the one whose ack was refused"
    for key in {key for key, _ in handler.handled}:
        offsets = [offset for each, offset in handler.handled if each == key]
        assert list(dict.fromkeys(offsets)) == sorted(set(offsets))


def test_killed_handler_repeats_few_messages_without_a_key_when_acks_are_refused():
    """One of each worker: the next one without a key waits for acks that were refused."""
    handler = FailingHandler()
    counts = run(story_of(handler, handler=handler.one, keyless=True))
    assert len(counts) == 2 * PAIRS
    assert sum(count > 1 for count in counts.values()) <= 4


async def durable_offsets(cluster: VirtualCluster) -> int:
    async with Admin(cluster.address) as admin:
        (row,) = (await admin.describe_group("orders", "g")).partitions
    return row.next_offset - row.lag


@pytest.mark.parametrize("strategy", ["exclusive", "shared"])
@pytest.mark.parametrize("together", [False, True])
def test_ack_by_hand_returns_only_once_it_is_durable_when_acks_are_refused(
    strategy: str, together: bool
):
    """It waits for the acks of older messages; a second ack waits too, and a cancelled one is made
    all the same.
    """

    async def story(cluster: VirtualCluster) -> None:
        await fill(cluster)
        async with Consumer(
            cluster.address,
            subject="orders",
            group="g",
            ack="each",
            settings=ConsumerSettings(consume_strategy=strategy),
        ) as consumer:
            taken: list[Message] = []
            while len(taken) < 100:
                taken += await consumer.getmany(max_records=100 - len(taken))

            async def ack(message: Message) -> None:
                await (consumer.ack([message]) if together else message.ack())

            for message in taken[1 : 2 * RANGES_MAX : 2]:
                await ack(message)
            refused = taken[2 * RANGES_MAX + 1]
            for _ in range(2):
                with pytest.raises(TimeoutError):
                    await asyncio.wait_for(ack(refused), 5)
            assert await durable_offsets(cluster) == RANGES_MAX
            waiting = asyncio.create_task(ack(taken[2 * RANGES_MAX + 3]))
            await asyncio.sleep(1)
            assert not waiting.done()
            for message in taken[0 : 2 * RANGES_MAX + 3 : 2]:
                await ack(message)
            await asyncio.wait_for(waiting, 60)
            await ack(refused)
            assert await durable_offsets(cluster) == 2 * RANGES_MAX + 4

    run(story)


def test_ack_by_hand_raises_when_the_lease_ends_while_it_is_refused():
    """The message is delivered to the next owner: its ack was never made."""

    async def story(cluster: VirtualCluster) -> None:
        await fill(cluster)
        consumer = Consumer(cluster.address, subject="orders", group="g", ack="each")
        async with consumer:
            taken = await consumer.getmany(max_records=100)
            await consumer.ack(taken[1 : 2 * RANGES_MAX : 2])
            waiting = asyncio.create_task(taken[2 * RANGES_MAX + 1].ack())
            await asyncio.sleep(1)
        with pytest.raises(Exception, match="lease of this message's partition has ended"):
            await asyncio.wait_for(waiting, 60)

    run(story)


@pytest.mark.parametrize("together", [False, True])
def test_loop_goes_on_when_its_refused_ack_waits_for_a_message_that_it_gave_back(together: bool):
    """One task takes, gives back and acks: it is told that no room can come, and its ack is made
    all the same.
    """

    async def story(cluster: VirtualCluster) -> None:
        await fill(cluster)
        acked: list[tuple[bytes, int]] = []
        refused: list[OverloadedError] = []
        async with Consumer(cluster.address, subject="orders", group="g", ack="each") as consumer:
            while len(acked) < 2 * PAIRS:
                message = await anext(consumer)
                if message.key == b"bad" and not refused:
                    await message.nack()
                    continue
                acked.append((message.key, message.offset))
                try:
                    await (consumer.ack([message]) if together else message.ack())
                except OverloadedError as error:
                    refused.append(error)
            async with Admin(cluster.address) as admin:
                async with asyncio.timeout(60):
                    while await admin.lag("orders", "g"):
                        await asyncio.sleep(1)
        assert all("Keep taking and acking" in error.hint for error in refused)
        assert refused
        assert len(set(acked)) == 2 * PAIRS
        for key in {key for key, _ in acked}:
            offsets = [offset for each, offset in acked if each == key]
            assert offsets == sorted(offsets)

    run(story)
