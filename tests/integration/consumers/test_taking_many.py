"""Batches, many messages at once, Arrow data and threads, on real servers: order, acks, and what a
failure leaves.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import defaultdict

import pytest

from keylane import (
    ArrowBatch,
    ClosedError,
    Consumer,
    ConsumerSettings,
    InvalidRequestError,
    LeaseLostError,
    Message,
    Producer,
)
from keylane.errors import Reason
from support.cluster import Cluster, eventually
from support.raising import raises


async def fill(
    cluster: Cluster, subject: str, count: int, *, keys: int, partitions: int = 1
) -> None:
    await cluster.create(subject, partitions=partitions)
    async with Producer(cluster.meta) as producer:
        for number in range(count):
            producer.send(subject, b"%d" % number, key=b"k%d" % (number % keys))


def assert_in_order(messages: list[Message], count: int, keys: int) -> None:
    """Each message once, those of a key in their order."""
    by_key: dict[bytes, list[int]] = defaultdict(list)
    for message in messages:
        by_key[message.key].append(int(message.value))
    assert len(by_key) == keys
    for key, values in by_key.items():
        assert values == list(range(int(key[1:]), count, keys))


@pytest.mark.parametrize("ack", ["lingering", "each"])
async def test_batch_handler_gets_everything_in_order_over_failures(
    shared_cluster: Cluster, ack: str
):
    """One batch in five fails; two batches never have a key together; all is acked."""
    subject = f"batches-{ack}"
    await fill(shared_cluster, subject, 1_000, keys=20, partitions=2)
    done: list[Message] = []
    running: set[bytes] = set()
    calls = 0

    async def handle(messages: list[Message]) -> None:
        nonlocal calls
        calls += 1
        keys = {message.key for message in messages}
        assert not keys & running
        assert len({message.partition_id for message in messages}) == 1
        running.update(keys)
        await asyncio.sleep(0.002)
        running.difference_update(keys)
        if calls % 5 == 2:
            raise ValueError("one in five")
        done.extend(messages)

    async with Consumer(
        shared_cluster.meta,
        subject=subject,
        group="g",
        batch_handler=handle,
        settings=ConsumerSettings(max_records=50),
        ack=ack,
    ) as consumer:
        await eventually(lambda: len(done) == 1_000)
        await eventually(lambda: consumer.lag.messages == 0)
        assert consumer.lag.seconds == 0
    assert_in_order(done, 1_000, 20)


async def test_getmany_gives_messages_of_a_key_together_and_holds_later_ones(
    shared_cluster: Cluster,
):
    """Given back, they come again in their order; a foreign message and a second way of taking are
    refused.
    """
    await fill(shared_cluster, "getmany", 30, keys=3)
    done: list[Message] = []
    async with (
        asyncio.timeout(60),
        Consumer(shared_cluster.meta, subject="getmany", group="g") as consumer,
        Consumer(shared_cluster.meta, subject="getmany", group="other") as other,
    ):
        first: list[Message] = []
        while len(first) < 4:
            first += await consumer.getmany(max_records=4 - len(first))
        assert [int(message.value) for message in first] == [0, 1, 2, 3]
        assert await consumer.getmany(timeout_ms=100) == [], "all keys are in hand"
        await consumer.nack(first[:1])
        with pytest.raises(InvalidRequestError):
            await consumer.ack(first)
        await consumer.ack(first[1:3])
        stranger = await other.getmany(max_records=1, timeout_ms=30_000)
        with pytest.raises(InvalidRequestError, match=r"consumer\.ack\(\[message\]\)"):
            await consumer.ack(first[3])  # type: ignore[arg-type]
        with pytest.raises(InvalidRequestError, match="a list of messages, not 3"):
            await consumer.nack(3)  # type: ignore[arg-type]
        with pytest.raises(InvalidRequestError, match="another consumer"):
            await consumer.ack(stranger)
        with raises(Reason.MIXED_USE):
            await anext(consumer)
        with pytest.raises(InvalidRequestError, match="max_records must be"):
            await consumer.getmany(max_records=0)
        done += first[1:3]
        while len(done) < 30:
            messages = await consumer.getmany(max_records=7)
            await consumer.ack(messages)
            await consumer.ack(messages)  # a repeated ack is harmless
            done += messages
        waiting = asyncio.create_task(consumer.getmany(timeout_ms=30_000))
        await asyncio.sleep(0.01)
        with raises(Reason.OTHER_TASK):
            await consumer.getmany()
        await eventually(lambda: consumer.lag.messages == 0)
    with pytest.raises(ClosedError):
        await waiting
    with pytest.raises(LeaseLostError):
        await consumer.ack(done[:1])
    assert_in_order(done, 30, 3)
    assert {message.attempt for message in done if message.value in (b"0", b"3")} == {2}


async def test_iteration_holds_a_key_until_its_message_is_acked(shared_cluster: Cluster):
    """A loop that goes on without an ack gets other keys, and nothing comes past what it left."""
    await fill(shared_cluster, "strict-loop", 9, keys=3)
    async with (
        asyncio.timeout(60),
        Consumer(shared_cluster.meta, subject="strict-loop", group="g") as consumer,
    ):
        first = [await anext(consumer) for _ in range(3)]
        assert sorted(message.key for message in first) == [b"k0", b"k1", b"k2"]
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(anext(consumer), 0.2)
        await first[1].ack()
        assert (await anext(consumer)).value == b"4"
    async with (
        asyncio.timeout(60),
        Consumer(shared_cluster.meta, subject="strict-loop", group="g") as consumer,
    ):
        again = []
        while len(again) < 8:
            again.append(await anext(consumer))
            await again[-1].ack()
    assert [message.value for message in again if message.key == b"k0"] == [b"0", b"3", b"6"]
    assert [message.value for message in again if message.key == b"k1"] == [b"4", b"7"]


async def test_arrow_batches_come_one_by_one_of_each_partition(shared_cluster: Cluster):
    """A batch given back comes again; what is acked is not delivered to the next consumer."""
    await fill(shared_cluster, "arrow", 400, keys=10, partitions=2)
    seen: dict[int, list[int]] = defaultdict(list)
    rows: list[tuple[bytes, bytes]] = []

    async def take(count: int) -> None:
        async with (
            asyncio.timeout(60),
            Consumer(shared_cluster.meta, subject="arrow", group="g") as consumer,
        ):
            nacked: ArrowBatch | None = None
            async for batch in consumer.batches():
                assert len(batch) == batch.record_batch.num_rows
                if nacked is None:
                    nacked = batch
                    await batch.nack()
                    with pytest.raises(InvalidRequestError):
                        await batch.ack()
                    with pytest.raises(InvalidRequestError):
                        await batch.nack()
                    continue
                offsets = batch.record_batch.column("offset").to_pylist()
                assert offsets == list(range(batch.start_offset, batch.next_offset))
                seen[batch.partition_id] += offsets
                keys = batch.record_batch.column("key").to_pylist()
                rows.extend(zip(keys, batch.record_batch.column("value").to_pylist(), strict=True))
                await batch.ack()
                await batch.ack()
                if len(rows) >= count:
                    break
            assert nacked.attempt == 2
            await eventually(lambda: consumer.lag.messages == 0)

    await take(400)
    for offsets in seen.values():
        assert offsets == list(range(len(offsets)))
    by_key: dict[bytes, list[int]] = defaultdict(list)
    for key, value in rows:
        by_key[key].append(int(value))
    assert all(values == sorted(set(values)) for values in by_key.values())
    assert len(rows) == 400
    async with Consumer(shared_cluster.meta, subject="arrow", group="g") as consumer:
        assert await consumer.getmany(timeout_ms=300) == []


async def test_blocking_handlers_run_in_threads_in_the_order_of_their_key(shared_cluster: Cluster):
    """Several at once, none of one key together; heartbeats go on; a hand-over waits for a thread
    that runs.
    """
    await fill(shared_cluster, "threads", 60, keys=6)
    running: set[bytes] = set()
    lock = threading.Lock()
    done: list[Message] = []
    most = 0
    names: set[str] = set()

    def handle(message: Message) -> None:
        nonlocal most
        with lock:
            assert message.key not in running
            running.add(message.key)
            most = max(most, len(running))
        time.sleep(0.6 if message.value == b"59" else 0.005)
        with lock:
            names.add(threading.current_thread().name)
            running.discard(message.key)
            done.append(message)

    consumer = Consumer(
        shared_cluster.meta,
        subject="threads",
        group="g",
        handler=handle,
        settings=ConsumerSettings(threads=4),
    )
    async with consumer:
        await eventually(lambda: len(done) >= 59)
    assert not running, "the last one was waited for"
    assert 2 <= most <= 4
    assert names <= {f"keylane handler {number}" for number in range(4)}
    assert_in_order(done, 60, 6)


async def test_getmany_and_a_loop_are_refused_when_a_handler_gets_the_messages(
    shared_cluster: Cluster,
):
    await shared_cluster.create("handled-only", partitions=1)
    consumer = Consumer(shared_cluster.meta, subject="handled-only", group="g", handler=print)
    async with consumer:
        with raises(Reason.MIXED_USE):
            await consumer.getmany()
        with raises(Reason.MIXED_USE):
            await anext(consumer)
