"""Messages that wait for retry, while their partition moves, brokers and consumers are killed, and
batch handlers fail.
"""

from __future__ import annotations

import asyncio
from itertools import pairwise
from pathlib import Path

from integration.parking.test_parked_keys import Handler, send
from integration.parking.test_retries import FAST, attempts_of, consumer_of, retrier, retrying
from keylane import Admin, Consumer, ConsumerSettings, Message, Producer
from keylane.protocol.operations import OperationKind, Reshape
from support.cluster import Cluster, eventually


async def test_tries_are_counted_on_through_a_move_and_a_kill_of_the_brokers(tmp_path: Path):
    """No count falls or leaves one out, and once the handler is mended each message is handled
    once.
    """
    subject, handler = "orders", Handler()
    handler.poison = {b"bad"}

    def attempts(value: int) -> list[int]:
        return [each[2] for each in handler.tried if each[:2] == (b"bad", value)]

    with Cluster(tmp_path) as cluster:
        route = await cluster.create(subject, partitions=1, strategy="best_tried")
        (partition,) = route.open_partitions()
        async with (
            asyncio.timeout(90),
            Producer(cluster.meta) as producer,
            Admin(cluster.meta) as admin,
            consumer_of(cluster, subject, handler, tries_max=10_000),
        ):
            await send(producer, subject, b"bad", 0, 1)
            await eventually(lambda: min(len(attempts(0)), len(attempts(1))) >= 3)
            other = ({"g1", "g2"} - {partition.broker_group}).pop()
            await cluster.reshape(
                Reshape(
                    kind=OperationKind.MOVE,
                    partition_ids=(partition.partition_id,),
                    broker_group=other,
                )
            )
            await send(producer, subject, b"good", 0)
            await eventually(lambda: handler.handled[b"good"] == [0])
            known = len(attempts(0))
            await eventually(lambda: len(attempts(0)) > known + 1)
            for broker in cluster.brokers:
                broker.kill()
                broker.restart()
            known = len(attempts(0))
            await eventually(lambda: len(attempts(0)) > known + 1)
            handler.poison = set()
            await eventually(lambda: len(handler.handled[b"bad"]) == 2)
            while await retrying(admin, subject):
                await asyncio.sleep(0.05)
            await asyncio.sleep(0.5)
    assert sorted(handler.handled[b"bad"]) == [0, 1]
    for value in (0, 1):
        steps = {after - before for before, after in pairwise(attempts(value))}
        assert steps <= {0, 1}


async def test_message_that_ends_two_processes_in_its_retries_is_a_dead_letter(
    shared_cluster: Cluster, tmp_path: Path
):
    """The first time it waits on; the next owner has it durable that its try begins, and dies of it
    too.
    """
    subject, path, mended = "retry-dies", tmp_path / "handed", tmp_path / "mended"
    await shared_cluster.create(subject, partitions=1, strategy="best_tried")
    async with (
        asyncio.timeout(90),
        Producer(shared_cluster.meta) as producer,
        Admin(shared_cluster.meta) as admin,
    ):
        await send(producer, subject, b"bad", 0)
        await send(producer, subject, b"good", 0)
        for _ in range(2):
            with retrier(shared_cluster, subject, path, mended, dies_from=2) as process:
                assert await asyncio.to_thread(process.wait, 60) == 9
        with retrier(shared_cluster, subject, path, mended, dies_from=2):
            while not (dead := [view async for view in admin.parked(subject, "g", key=None)]):
                await asyncio.sleep(0.05)
            await send(producer, subject, b"good", 1)
            await eventually(lambda: attempts_of(path, "good", 1))
        assert await retrying(admin, subject) == 0
    assert dead[0].messages == 1
    assert dead[0].failure is not None
    assert dead[0].failure.kind == "crashed"
    assert attempts_of(path, "bad", 0) == [1, 2, 2]


async def test_failing_message_of_a_batch_handler_is_tried_again_in_batches(
    shared_cluster: Cluster,
):
    """It is found by trying messages alone; others of its batch and later ones of its key are
    handled meanwhile.
    """
    subject = "retry-batches"
    await shared_cluster.create(subject, partitions=1, strategy="best_tried")
    handled: list[tuple[bytes, bytes]] = []
    tried: list[int] = []
    mended = asyncio.Event()

    async def handle(messages: list[Message]) -> None:
        for message in messages:
            if (message.key, message.value) == (b"bad", b"0"):
                tried.append(message.attempt)
                if not mended.is_set():
                    raise ValueError("not now")
        handled.extend((message.key, message.value) for message in messages)

    consumer = Consumer(
        shared_cluster.meta,
        subject=subject,
        group="g",
        batch_handler=handle,
        tries_max=10_000,
        settings=ConsumerSettings(retry_backoff=FAST, handler_backoff=FAST, backoff=FAST),
    )
    async with (
        asyncio.timeout(60),
        Producer(shared_cluster.meta) as producer,
        Admin(shared_cluster.meta) as admin,
        consumer,
    ):
        await send(producer, subject, b"bad", 0, 1)
        await send(producer, subject, b"good", 0, 1)
        others = {(b"bad", b"1"), (b"good", b"0"), (b"good", b"1")}
        # A batch of all four is halved until its message is alone, at the fourth try; the fifth is
        # of one durably set aside.
        await eventually(lambda: set(handled) == others and max(tried) >= 5)
        assert await retrying(admin, subject) == 1
        mended.set()
        await eventually(lambda: (b"bad", b"0") in handled)
        while await retrying(admin, subject):
            await asyncio.sleep(0.05)
    assert sorted(handled) == sorted({*others, (b"bad", b"0")})
    assert tried == sorted(tried)
