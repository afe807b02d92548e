"""Consumers that want some messages: the others count as handled, durably and in order, whatever
the way of taking them.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace

import pytest

from keylane import Admin, Consumer, ConsumerSettings, Message, Producer
from keylane.errors import ConfigError, Reason
from keylane.protocol.backoff import Backoff
from support.cluster import Cluster, eventually
from support.raising import raises

FAST = ConsumerSettings(handler_backoff=Backoff(first_ms=5, max_ms=5))


class Wants:
    """Wants even values; fails for those in `broken`."""

    def __init__(self, *broken: int) -> None:
        self.broken = set(broken)
        self.failed = 0

    def __call__(self, message: Message) -> bool:
        number = int(message.value)
        if number in self.broken:
            self.failed += 1
            raise LookupError(f"no table for {number}")
        return number % 2 == 0


async def fill(
    cluster: Cluster, subject: str, count: int, *, keys: int = 3, partitions: int = 1
) -> None:
    """Message n has key n % `keys`; every fourth is tagged paid, the others are new."""
    await cluster.create(subject, partitions=partitions)
    async with Producer(cluster.meta) as producer:
        for number in range(count):
            tag = "new" if number % 4 else "paid"
            await producer.send(subject, b"%d" % number, key=b"k%d" % (number % keys), tags=[tag])


async def lag(cluster: Cluster, subject: str) -> int | None:
    async with Admin(cluster.meta) as admin:
        return (await admin.describe_group(subject, "g")).lag


async def until_lag(cluster: Cluster, subject: str, wanted: int) -> None:
    while await lag(cluster, subject) != wanted:
        await asyncio.sleep(0.02)


def values(messages: list[Message]) -> list[int]:
    return sorted(int(message.value) for message in messages)


@pytest.mark.parametrize("shared", [False, True])
async def test_handler_gets_tagged_messages_and_the_rest_is_acked(
    shared_cluster: Cluster, shared: bool
):
    """Also in partitions and batches without any; a later consumer without the filter gets nothing
    of it.
    """
    subject = f"tags-{shared}"
    strategy = "shared" if shared else "exclusive"
    await fill(shared_cluster, subject, 60, keys=7, partitions=2)
    handled: list[Message] = []
    async with asyncio.timeout(30):
        async with Consumer(
            shared_cluster.meta,
            subject=subject,
            group="g",
            settings=ConsumerSettings(tags=["paid", "void"], consume_strategy=strategy),
            handler=handled.append,
        ):
            await until_lag(shared_cluster, subject, 0)
        assert values(handled) == list(range(0, 60, 4))
        if not shared:
            by_key: dict[bytes, list[int]] = defaultdict(list)
            for message in handled:
                by_key[message.key].append(int(message.value))
            assert all(numbers == sorted(numbers) for numbers in by_key.values())
        async with Consumer(
            shared_cluster.meta,
            subject=subject,
            group="g",
            settings=ConsumerSettings(consume_strategy=strategy),
        ) as consumer:
            assert await consumer.getmany(timeout_ms=300) == []


async def test_cursor_rises_over_a_partition_without_wanted_messages(shared_cluster: Cluster):
    """Without a handler too, and no message of it crosses the network twice."""
    await fill(shared_cluster, "tags-none", 50)
    async with (
        asyncio.timeout(30),
        Consumer(
            shared_cluster.meta,
            subject="tags-none",
            group="g",
            settings=ConsumerSettings(tags=["void"]),
        ) as consumer,
    ):
        assert await consumer.getmany(timeout_ms=100) == []
        await until_lag(shared_cluster, "tags-none", 0)


async def test_message_whose_filter_fails_is_tried_again_and_others_go_on(shared_cluster: Cluster):
    """Later messages of its key wait for it; mended, the filter lets it pass."""
    await fill(shared_cluster, "filter-fails", 12)
    wants, handled = Wants(3, 6), list[Message]()
    async with (
        asyncio.timeout(30),
        Consumer(
            shared_cluster.meta,
            subject="filter-fails",
            group="g",
            handler=handled.append,
            settings=replace(FAST, filter=wants),
        ),
    ):
        await eventually(lambda: wants.failed > 2)
        await eventually(lambda: values(handled) == [0, 2, 4, 8, 10])
        wants.broken = set()
        await until_lag(shared_cluster, "filter-fails", 0)
    assert [int(message.value) for message in handled if message.key == b"k0"] == [0, 6]


async def test_message_whose_filter_fails_too_often_is_parked(shared_cluster: Cluster):
    """As by a handler's error; unwanted messages of the key are not parked behind it."""
    await fill(shared_cluster, "filter-parks", 24)
    handled: list[Message] = []
    async with (
        asyncio.timeout(30),
        Consumer(
            shared_cluster.meta,
            subject="filter-parks",
            group="g",
            handler=handled.append,
            settings=replace(FAST, filter=Wants(6)),
            on_failure="park",
            tries_max=2,
        ),
    ):
        await until_lag(shared_cluster, "filter-parks", 0)
        async with Producer(shared_cluster.meta) as producer:
            for number in (24, 27, 30, 31):
                await producer.send("filter-parks", b"%d" % number, key=b"k0")
        await until_lag(shared_cluster, "filter-parks", 0)
        async with Admin(shared_cluster.meta) as admin:
            (parked,) = [view async for view in admin.parked("filter-parks", "g")]
            shown = [
                each.message async for each in admin.parked_messages("filter-parks", "g", b"k0")
            ]
    assert parked.failure is not None
    assert parked.failure.kind == "FilterError"
    assert "no table for 6" in parked.failure.text
    late = {int(message.value) for message in shown if message is not None}
    assert {6, 24, 30} <= late
    assert not {27, 31} & late


async def take_by_iteration(consumer: Consumer, count: int) -> list[int]:
    taken: list[int] = []
    async for message in consumer:
        taken.append(int(message.value))
        await message.ack()
        if len(taken) == count:
            break
    return taken


async def take_many(consumer: Consumer, count: int) -> list[int]:
    taken: list[int] = []
    while len(taken) < count:
        messages = await consumer.getmany(max_records=5, timeout_ms=50)
        taken += [int(message.value) for message in messages]
        await consumer.ack(messages)
    return taken


@pytest.mark.parametrize("take", [take_by_iteration, take_many])
async def test_program_takes_wanted_messages_in_the_order_of_their_keys(
    shared_cluster: Cluster, take: Callable[..., object]
):
    """A message whose filter fails comes once it is mended, before later ones of its key; the rest
    is acked.
    """
    subject = take.__name__.replace("_", "-")
    await fill(shared_cluster, subject, 24)
    wants = Wants(6)
    async with (
        asyncio.timeout(30),
        Consumer(
            shared_cluster.meta, subject=subject, group="g", settings=replace(FAST, filter=wants)
        ) as consumer,
    ):
        others = [0, *(number for number in range(24) if number % 2 == 0 and number % 3)]
        assert sorted(await take(consumer, len(others))) == others  # type: ignore[misc]
        assert wants.failed
        wants.broken = set()
        assert await take(consumer, 3) == [6, 12, 18]  # type: ignore[misc]
        asked = asyncio.create_task(take(consumer, 1))  # type: ignore[arg-type]
        await until_lag(shared_cluster, subject, 0)
        asked.cancel()


async def test_consumer_with_another_filter_is_refused(shared_cluster: Cluster):
    """Its messages would be lost with the other member; the error names both."""
    await shared_cluster.create("filters-differ", partitions=1)
    known = {"subject": "filters-differ", "group": "g"}
    async with Consumer(
        shared_cluster.meta, settings=ConsumerSettings(tags=["paid"], name="first"), **known
    ):
        with raises(Reason.GROUP_FILTER) as caught:
            async with Consumer(
                shared_cluster.meta, settings=ConsumerSettings(filter={"country": "DE"}), **known
            ):
                pass
    assert (caught.value.stored, caught.value.asked) == ("tags paid", "country = 'DE'")
    assert caught.value.client == "first"
    async with Consumer(
        shared_cluster.meta, settings=ConsumerSettings(filter={"country": "DE"}), **known
    ) as consumer:
        with pytest.raises(ConfigError, match="every row"):
            await anext(consumer.batches())
