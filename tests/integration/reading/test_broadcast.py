"""Broadcast consumers on real processes: every message in every one, in order, from the opening on,
and no group.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from keylane import Admin, Consumer, ConsumerSettings, Message, Producer
from keylane.errors import ConfigError, Reason
from keylane.protocol.backoff import Backoff
from keylane.protocol.operations import OperationKind, Reshape
from keylane.sync import Consumer as SyncConsumer
from support.cluster import Cluster, eventually
from support.consumer_options import consumer_options
from support.raising import raises

KEYS = [b"key-%d" % number for number in range(6)]
FAST = ConsumerSettings(handler_backoff=Backoff(first_ms=5, max_ms=5))


async def send(cluster: Cluster, subject: str, numbers: range) -> None:
    """For each number a message of every key."""
    async with Producer(cluster.meta) as producer:
        for number in numbers:
            for key in KEYS:
                producer.send(subject, b"%d" % number, key=key)
        await producer.flush()


def by_key(messages: list[Message]) -> dict[bytes, list[int]]:
    values: dict[bytes, list[int]] = {}
    for message in messages:
        values.setdefault(message.key, []).append(int(message.value))
    return values


def each(numbers: range) -> dict[bytes, list[int]]:
    return {key: list(numbers) for key in KEYS}


async def move_all(cluster: Cluster, subject: str) -> None:
    async with Admin(cluster.meta) as admin:
        history = (await admin.history(subject)).partitions
    for partition in (past.partition for past in history if past.partition.state == "open"):
        to = "g2" if partition.broker_group == "g1" else "g1"
        ids = (partition.partition_id,)
        await cluster.reshape(Reshape(kind=OperationKind.MOVE, partition_ids=ids, broker_group=to))


async def test_broadcast_consumers_get_every_message_in_order(shared_cluster: Cluster):
    """Through a resize and moves, with handlers of one message and of batches; one that is opened
    later begins there.
    """
    subject = "bc-all"
    await shared_cluster.create(subject, partitions=2)
    await send(shared_cluster, subject, range(2))
    single, batched, later = list[Message](), list[Message](), list[Message]()

    async def handle(message: Message) -> None:
        await asyncio.sleep(0.001)
        single.append(message)

    several = Consumer(shared_cluster.meta)
    several.on(subject, settings=ConsumerSettings(broadcast=True, max_records=7), batch=True)(
        batched.extend
    )
    async with (
        asyncio.timeout(120),
        Consumer(
            shared_cluster.meta,
            subject=subject,
            settings=ConsumerSettings(broadcast=True),
            handler=handle,
        ),
        several,
    ):
        await send(shared_cluster, subject, range(2, 20))
        ask = Reshape(kind=OperationKind.RESIZE, subject=subject, partitions=3)
        await shared_cluster.reshape(ask)
        await send(shared_cluster, subject, range(20, 40))
        await move_all(shared_cluster, subject)
        async with Consumer(
            shared_cluster.meta,
            subject=subject,
            settings=ConsumerSettings(broadcast=True),
            handler=later.append,
        ):
            await send(shared_cluster, subject, range(40, 60))
            total = 58 * len(KEYS)
            await eventually(lambda: len(single) >= total and len(batched) >= total)
            await eventually(lambda: len(later) >= 20 * len(KEYS))
        async with Admin(shared_cluster.meta) as admin:
            assert await admin.list_groups(subject) == []
    assert by_key(single) == by_key(batched) == each(range(2, 60))
    assert by_key(later) == each(range(40, 60))
    assert {(message.group, message.fencing_token) for message in single} == {("", 0)}


async def test_broadcast_consumer_begins_at_the_latest_message_when_it_is_opened_again(
    shared_cluster: Cluster,
):
    """In a loop of its own; what was sent while it was closed does not come."""
    subject = "bc-again"
    await shared_cluster.create(subject, partitions=2)
    consumer = Consumer(
        shared_cluster.meta, subject=subject, settings=ConsumerSettings(broadcast=True)
    )
    for first in (0, 10):
        await send(shared_cluster, subject, range(first, first + 3))
        async with asyncio.timeout(60), consumer:
            await send(shared_cluster, subject, range(first + 3, first + 5))
            messages: list[Message] = []
            while len(messages) < 2 * len(KEYS):
                taken = await consumer.getmany()
                messages += taken
                await consumer.ack(taken)
            assert await consumer.getmany(timeout_ms=300) == []
            assert consumer.lag.messages == 0
        assert by_key(messages) == each(range(first + 3, first + 5))


async def test_failing_message_holds_only_its_key_back(shared_cluster: Cluster):
    """It is tried again in place, as in a group; tags and filters are as there too."""
    subject = "bc-failing"
    await shared_cluster.create(subject, partitions=1)
    handled, mended = list[Message](), asyncio.Event()

    async def handle(message: Message) -> None:
        if message.key == KEYS[0] and not mended.is_set():
            raise LookupError("not yet")
        handled.append(message)

    async with (
        asyncio.timeout(60),
        Consumer(
            shared_cluster.meta,
            subject=subject,
            handler=handle,
            settings=replace(
                FAST, broadcast=True, filter=lambda message: int(message.value) % 2 == 0
            ),
        ) as consumer,
    ):
        await send(shared_cluster, subject, range(10))
        await eventually(lambda: len(handled) == 5 * (len(KEYS) - 1))
        assert KEYS[0] not in by_key(handled)
        mended.set()
        await eventually(lambda: len(handled) == 5 * len(KEYS))
        await eventually(lambda: consumer.lag.messages == 0)
    assert by_key(handled) == {key: [0, 2, 4, 6, 8] for key in KEYS}
    assert max(message.attempt for message in handled) > 1


async def test_suspended_broadcast_consumer_goes_on_behind_what_it_has_handled(
    shared_cluster: Cluster,
):
    subject = "bc-suspended"
    await shared_cluster.create(subject, partitions=2)
    handled = list[Message]()
    async with (
        asyncio.timeout(60),
        Consumer(
            shared_cluster.meta,
            subject=subject,
            settings=ConsumerSettings(broadcast=True),
            handler=handled.append,
        ) as consumer,
    ):
        await send(shared_cluster, subject, range(3))
        await eventually(lambda: len(handled) == 3 * len(KEYS))
        await consumer.suspend()
        assert consumer.assignment == []
        await send(shared_cluster, subject, range(3, 5))
        await asyncio.sleep(0.3)
        assert len(handled) == 3 * len(KEYS)
        await consumer.resume()
        await eventually(lambda: len(handled) == 5 * len(KEYS))
    assert by_key(handled) == each(range(5))


async def test_broadcast_consumer_rides_out_a_restart_of_its_broker(cluster: Cluster):
    await cluster.create("s", partitions=1)
    handled = list[Message]()
    async with (
        asyncio.timeout(90),
        Consumer(
            cluster.meta,
            subject="s",
            settings=ConsumerSettings(broadcast=True),
            handler=handled.append,
        ),
    ):
        await send(cluster, "s", range(2))
        await eventually(lambda: len(handled) == 2 * len(KEYS))
        for broker in cluster.brokers:
            broker.kill()
            broker.restart()
        await send(cluster, "s", range(2, 4))
        await eventually(lambda: len(handled) == 4 * len(KEYS))
    assert by_key(handled) == each(range(4))


async def test_sync_consumer_takes_a_broadcast(shared_cluster: Cluster):
    subject = "bc-sync"
    await shared_cluster.create(subject, partitions=1)

    def take(consumer: SyncConsumer[Any]) -> list[int]:
        numbers = []
        for message in consumer:
            numbers.append(int(message.value))
            message.ack()
            if len(numbers) == 2 * len(KEYS):
                break
        return numbers

    consumer: SyncConsumer[Any] = SyncConsumer(
        shared_cluster.meta, subject=subject, settings=ConsumerSettings(broadcast=True)
    )
    await asyncio.to_thread(consumer.open)
    try:
        await send(shared_cluster, subject, range(2))
        async with asyncio.timeout(60):
            numbers = await asyncio.to_thread(take, consumer)
        assert sorted(numbers) == [0] * len(KEYS) + [1] * len(KEYS)
    finally:
        await asyncio.to_thread(consumer.close)


@pytest.mark.parametrize(
    ("wrong", "advice"),
    [
        ({"broadcast": 1}, "True or False"),
        ({"group": "g"}, "leave group= out"),
        ({"start": "-1h"}, "use a Reader"),
        ({"ack": "each"}, "ack='each' needs a group"),
        ({"ack": "before", "handler": print}, "ack='before' needs a group"),
        ({"on_failure": "park"}, "handle the error"),
        ({"on_failure": "dead"}, "handle the error"),
        ({"consume_strategy": "shared"}, "use a group"),
        ({"instance": "a"}, "instance= needs a group"),
    ],
)
def test_broadcast_refuses_what_only_a_group_has(wrong: dict[str, Any], advice: str):
    with pytest.raises(ConfigError, match=advice):
        Consumer("127.0.0.1:1", **consumer_options(**({"subject": "s", "broadcast": True} | wrong)))


def test_broadcast_needs_a_subject():
    with pytest.raises(ConfigError, match="needs a subject"):
        Consumer("127.0.0.1:1", settings=ConsumerSettings(broadcast=True))


def test_seek_of_a_broadcast_is_refused_with_the_way_to_read_older_messages():
    with raises(Reason.SEEK_IN_GROUP, match="a Reader begins anywhere"):
        Consumer("127.0.0.1:1", subject="s", settings=ConsumerSettings(broadcast=True)).seek()
