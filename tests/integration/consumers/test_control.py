"""What a program sees and steers of its partitions: pauses, positions, call-backs; several subjects
in one object.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np
import pytest

from keylane import (
    ClosedError,
    Consumer,
    ConsumerSettings,
    InvalidRequestError,
    Message,
    Producer,
)
from keylane.errors import HandlerTypeError, PartitionUnknownError, Reason
from support.cluster import Cluster, eventually
from support.raising import raises


async def send(cluster: Cluster, subject: str, count: int) -> None:
    async with Producer(cluster.meta) as producer:
        for number in range(count):
            producer.send(subject, b"%d" % number, key=b"k%d" % (number % 8))


@pytest.mark.parametrize("kind", ["handler", "batch_handler", "getmany"])
async def test_paused_partition_gives_nothing_until_it_is_resumed(
    shared_cluster: Cluster, kind: str
):
    """Neither what comes then, nor what is pulled already; the position tells the lag."""
    subject = f"pausing-{kind.replace('_', '-')}"
    await shared_cluster.create(subject, partitions=2)
    got: list[Message] = []
    gate = asyncio.Event()

    async def handle(message: Message) -> None:
        await gate.wait()
        got.append(message)

    async def handle_batch(messages: list[Message]) -> None:
        await gate.wait()
        got.extend(messages)

    handlers = {"handler": {"handler": handle}, "batch_handler": {"batch_handler": handle_batch}}
    consumer = Consumer(
        shared_cluster.meta,
        subject=subject,
        group="g",
        settings=ConsumerSettings(concurrency=1, max_records=1, pull_wait_ms=100),
        **handlers.get(kind, {}),
    )

    async def take() -> None:
        while len(got) < 80:
            messages = await consumer.getmany(timeout_ms=100)
            got.extend(messages)
            await consumer.ack(messages)

    async with asyncio.timeout(90), consumer:
        await eventually(lambda: len(consumer.assignment) == 2)
        await send(shared_cluster, subject, 40)
        await eventually(lambda: sum(each.outstanding for each in consumer.assignment) == 40)
        paused, free = (each.partition_id for each in consumer.assignment)
        await consumer.pause(paused)
        assert [each.paused for each in consumer.assignment] == [True, False]
        gate.set()
        taking = asyncio.create_task(take()) if kind == "getmany" else None
        await eventually(lambda: consumer.position[free].lag_messages == 0)
        await send(shared_cluster, subject, 40)
        await eventually(
            lambda: consumer.position[free].cursor == consumer.position[free].end_offset
        )
        await asyncio.sleep(0.3)
        assert sum(message.partition_id == paused for message in got) <= 1, "one ran already"
        assert consumer.position[paused].lag_messages > 0
        assert consumer.lag.seconds > 0
        with pytest.raises(PartitionUnknownError):
            await consumer.resume(free, 999_999)
        await consumer.resume(paused)
        await eventually(lambda: len(got) == 80)
        await eventually(lambda: consumer.lag.messages == 0)
        if taking is not None:
            await taking
    for key in {message.key for message in got}:
        offsets = [message.offset for message in got if message.key == key]
        assert offsets == sorted(offsets)


async def test_callbacks_tell_of_partitions_that_come_and_go(shared_cluster: Cluster):
    """`on_assigned` precedes the first message; in `on_revoked` what is in hand may still be
    acked.
    """
    await shared_cluster.create("telling", partitions=2)
    await send(shared_cluster, "telling", 16)
    told: list[tuple[str, list[int]]] = []
    hand: list[Message] = []

    async def assigned(partition_ids: list[int]) -> None:
        await asyncio.sleep(0.1)
        told.append(("assigned", partition_ids))

    async def revoked(partition_ids: list[int]) -> None:
        told.append(("revoked", partition_ids))
        await first.ack([each for each in hand if each.partition_id in partition_ids])

    def failing(_partition_ids: list[int]) -> None:
        raise ValueError("told in the log")

    settings = ConsumerSettings(handover_ms=2_000, ttl_ms=5_000)
    first = Consumer(
        shared_cluster.meta,
        subject="telling",
        group="g",
        settings=replace(settings, on_assigned=assigned, on_revoked=revoked),
    )
    second = Consumer(
        shared_cluster.meta,
        subject="telling",
        group="g",
        settings=replace(settings, on_assigned=failing),
    )
    async with asyncio.timeout(90), first:
        while len(hand) < 16:
            hand += await first.getmany(timeout_ms=100)
            assert told or not hand, "nothing comes before"
        owned = [each.partition_id for each in first.assignment]
        assert told == [("assigned", owned)]
        async with second:
            await eventually(lambda: second.assignment)
            assert told[1:] == [("revoked", [second.assignment[0].partition_id])]
            assert await second.getmany(timeout_ms=300) == [], "all of it was acked"
    assert ("revoked", [first_left for first_left in owned if first_left != told[1][1][0]]) in told


async def test_seek_is_refused_with_the_way_to_reset():
    consumer = Consumer("127.0.0.1:1", subject="s", group="g")
    with raises(Reason.SEEK_IN_GROUP, match="keylane group reset"):
        consumer.seek(3, 100)
    with raises(Reason.SEEK_IN_GROUP, match="keylane group reset s g --to"):
        consumer.seek_to_time("-1h")
    with pytest.raises(InvalidRequestError, match="subject"):
        consumer.on("orders", group="g")


async def test_consumer_without_a_subject_handles_several(shared_cluster: Cluster):
    """They are opened and closed together, also by a handler."""
    for subject in ("several-a", "several-b"):
        await shared_cluster.create(subject, partitions=1)
        await send(shared_cluster, subject, 8)
    consumer = Consumer(shared_cluster.meta)
    with pytest.raises(HandlerTypeError, match=r"consumer\.on"):
        await consumer.run()
    got: dict[str, int] = {"several-a": 0, "several-b": 0}
    begun, refused = asyncio.Event(), asyncio.Event()

    @consumer.on("several-a", group="g", settings=ConsumerSettings(concurrency=2))
    async def one(message: Message) -> None:
        await take([message])

    @consumer.on("several-b", group="g", batch=True, settings=ConsumerSettings(max_records=4))
    async def many(messages: list[Message]) -> None:
        await take(messages)

    async def take(messages: list[Message]) -> None:
        begun.set()
        await refused.wait()  # else it may have closed before
        got[messages[0].subject] += len(messages)
        if sum(got.values()) == 16:
            await consumer.close()

    assert (consumer.assignment, consumer.position, consumer.waiting_for) == ([], {}, "")
    with pytest.raises(ClosedError):
        await consumer.pause()
    async with asyncio.timeout(60):
        running = asyncio.create_task(consumer.run())
        await begun.wait()
        await eventually(lambda: consumer.lag.messages == 16)
        owned = [each.partition_id for each in consumer.assignment]
        assert list(consumer.position) == owned
        assert len(owned) == 2
        await consumer.pause(owned[1])
        assert [each.paused for each in consumer.assignment] == [False, True]
        await consumer.resume(owned[1])
        await consumer.pause()
        assert all(each.paused for each in consumer.assignment)
        await consumer.resume(*owned)
        with pytest.raises(PartitionUnknownError, match="partition 999999 is not assigned"):
            await consumer.pause(owned[0], 999_999)
        by_id = r"as separate arguments, as in pause\(3, 5\) or pause\(\*consumer\.position\), not "
        with pytest.raises(InvalidRequestError, match=by_id + r"\["):
            await consumer.pause(owned)  # type: ignore[arg-type]
        with pytest.raises(InvalidRequestError, match=by_id + r"array\("):
            await consumer.pause(np.array(owned))  # type: ignore[arg-type]
        with pytest.raises(InvalidRequestError, match=by_id + "Assignment"):
            await consumer.pause(*consumer.assignment)  # type: ignore[arg-type]
        assert not any(each.paused for each in consumer.assignment)
        with raises(Reason.SEEK_IN_GROUP, match="keylane group reset"):
            consumer.seek(owned[0], 3)
        with raises(Reason.ALREADY_OPEN):
            consumer.on("several-a", group="h")(one)
        refused.set()
        await running
    assert got == {"several-a": 8, "several-b": 8}
