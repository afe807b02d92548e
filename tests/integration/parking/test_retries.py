"""A message of a best_tried subject that fails waits alone for its next try; everything else goes
on.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from integration.parking.test_parked_keys import Handler, send
from keylane import NACK, Admin, Consumer, ConsumerSettings, Message, Producer, Retry
from keylane.errors import Reason
from keylane.protocol.backoff import Backoff
from keylane.protocol.operations import OperationKind, Reshape
from support.cluster import Cluster, eventually
from support.consumer_options import consumer_options
from support.raising import raises
from support.server_process import ForkedProcess, run_keylane

RETRIER = Path(__file__).with_name("retrier.py")
FAST = Backoff(first_ms=60, max_ms=200)


def consumer_of(cluster: Cluster, subject: str, handler: object, **given: object) -> Consumer:
    options = {"retry_backoff": FAST, "backoff": FAST, **given}
    return Consumer(
        cluster.meta, **consumer_options(subject=subject, group="g", handler=handler, **options)
    )


async def retrying(admin: Admin, subject: str) -> int:
    described = await admin.describe_group(subject, "g")
    return sum(partition.retrying or 0 for partition in described.partitions)


async def test_failing_message_waits_alone_and_later_ones_of_its_key_go_on(
    shared_cluster: Cluster,
):
    subject, handler = "retry-alone", Handler()
    await shared_cluster.create(subject, partitions=1, strategy="best_tried")
    handler.poison = {b"bad"}
    async with (
        asyncio.timeout(60),
        Producer(shared_cluster.meta) as producer,
        Admin(shared_cluster.meta) as admin,
        consumer_of(shared_cluster, subject, handler),
    ):
        await send(producer, subject, b"bad", 0)
        await eventually(lambda: (b"bad", 0, 3) in handler.tried)
        assert await retrying(admin, subject) == 1
        described = await asyncio.to_thread(
            run_keylane, "group", "describe", subject, "g", "--meta", shared_cluster.meta
        )
        assert "retry" in described.stdout
        handler.poison = set()
        await send(producer, subject, b"bad", 1)
        await eventually(lambda: sorted(handler.handled[b"bad"]) == [0, 1])
        while await retrying(admin, subject):
            await asyncio.sleep(0.05)
    attempts = [attempt for _, value, attempt in handler.tried if value == 0]
    assert attempts == list(range(1, len(attempts) + 1))


@pytest.mark.parametrize("how", ["raise", "Retry", "NACK", "nack"])
async def test_each_way_to_fail_ends_as_a_dead_letter(shared_cluster: Cluster, how: str):
    """Behind `tries_max` tries; then `dead retry` has it handled."""
    subject, tried = f"retry-dead-{how}", []
    await shared_cluster.create(subject, partitions=1, strategy="best_tried")
    mended = asyncio.Event()

    async def handle(message: Message) -> object:
        tried.append((message.value, message.attempt))
        if message.value == b"0" and not mended.is_set():
            if how == "Retry":
                raise Retry("later", after_s=0.01)
            if how == "NACK":
                return NACK
            raise ValueError("no")
        return None

    async def iterate(consumer: Consumer) -> None:
        async for message in consumer:
            tried.append((message.value, message.attempt))
            if message.value == b"0" and not mended.is_set():
                await message.nack()
            else:
                await message.ack()

    handler = None if how == "nack" else handle
    async with (
        asyncio.timeout(60),
        Producer(shared_cluster.meta) as producer,
        Admin(shared_cluster.meta) as admin,
        consumer_of(shared_cluster, subject, handler, tries_max=4) as consumer,
    ):
        looping = asyncio.create_task(iterate(consumer)) if handler is None else None
        await send(producer, subject, b"bad", 0, 1, 2)
        await eventually(lambda: {(b"1", 1), (b"2", 1)} <= set(tried))
        await eventually(lambda: (b"0", 4) in tried)
        while not (dead := [view async for view in admin.parked(subject, "g", key=None)]):
            await asyncio.sleep(0.05)
        assert (dead[0].messages, await retrying(admin, subject)) == (1, 0)
        assert dead[0].failure is not None
        assert dead[0].failure.attempts == 4
        assert [attempt for value, attempt in tried if value == b"0"] == [1, 2, 3, 4]
        mended.set()
        await admin.redrive(subject, "g", key=None)
        await eventually(lambda: len([value for value, _ in tried if value == b"0"]) == 5)
        if looping is not None:
            looping.cancel()


@contextmanager
def retrier(
    cluster: Cluster, subject: str, path: Path, mended: Path, *, dies_from: int = 1_000
) -> Iterator[ForkedProcess]:
    arguments = [cluster.meta, subject, str(path), str(mended), str(dies_from)]
    with open(os.devnull, "w") as nowhere:
        process = ForkedProcess(str(RETRIER), arguments, os.environ, {2: nowhere.fileno()})
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def attempts_of(path: Path, key: str, value: int) -> list[int]:
    lines = [line.split() for line in path.read_text().splitlines()] if path.exists() else []
    return [int(attempt) for k, v, attempt in lines if (k, int(v)) == (key, value)]


async def test_tries_are_counted_on_through_a_kill_and_a_resize(
    shared_cluster: Cluster, tmp_path: Path
):
    """SIGKILL of the consumer, then a resize: the child has what waits, with its tries; others go
    on all the while.
    """
    subject, path, mended = "retry-kill", tmp_path / "handed", tmp_path / "mended"
    await shared_cluster.create(subject, partitions=1, strategy="best_tried")
    async with (
        asyncio.timeout(90),
        Producer(shared_cluster.meta) as producer,
        Admin(shared_cluster.meta) as admin,
    ):
        await send(producer, subject, b"bad", 0, 1)
        await send(producer, subject, b"good", 0)
        with retrier(shared_cluster, subject, path, mended) as process:
            await eventually(lambda: len(attempts_of(path, "bad", 0)) >= 3)
            process.kill()
        before = attempts_of(path, "bad", 0)
        assert before == list(range(1, len(before) + 1))
        with retrier(shared_cluster, subject, path, mended):
            await eventually(lambda: len(attempts_of(path, "bad", 0)) > len(before) + 1)
            first = attempts_of(path, "bad", 0)[len(before)]
            assert first in {before[-1], before[-1] + 1}
            ask = Reshape(kind=OperationKind.RESIZE, subject=subject, partitions=2)
            await shared_cluster.reshape(ask)
            await send(producer, subject, b"good", 1)
            await eventually(lambda: attempts_of(path, "good", 1))
            known = len(attempts_of(path, "bad", 0))
            await eventually(lambda: len(attempts_of(path, "bad", 0)) > known + 1)
            assert attempts_of(path, "bad", 0)[-1] > first
            mended.touch()
            while await retrying(admin, subject):
                await asyncio.sleep(0.05)
    assert len(attempts_of(path, "bad", 1)) > 1


async def test_retry_is_refused_on_a_strict_subject(shared_cluster: Cluster):
    """By the code of a consumer, and as the stored policy; the advice names what keeps the
    order.
    """
    subject = "retry-strict"
    await shared_cluster.create(subject, partitions=1)
    with raises(Reason.RETRY_POLICY, match="strict") as caught:
        async with consumer_of(shared_cluster, subject, Handler(), on_failure="retry"):
            pass
    assert "park" in caught.value.hint
    async with Admin(shared_cluster.meta) as admin:
        with raises(Reason.RETRY_POLICY):
            await admin.set_group(subject, "g", on_failure="retry")


async def test_list_shows_the_tries_and_the_next_time_of_what_waits_for_retry(
    shared_cluster: Cluster,
):
    subject, handler = "retry-listed", Handler()
    await shared_cluster.create(subject, partitions=1, strategy="best_tried")
    handler.poison = {b"bad"}
    slow = Backoff(first_ms=60_000, max_ms=60_000)
    consumer = Consumer(
        shared_cluster.meta,
        subject=subject,
        group="g",
        handler=handler,
        settings=ConsumerSettings(retry_backoff=slow),
    )
    async with (
        asyncio.timeout(60),
        Producer(shared_cluster.meta) as producer,
        Admin(shared_cluster.meta) as admin,
        consumer,
    ):
        await send(producer, subject, b"bad", 0, 1)
        waiting = []
        while sum(view.messages for view in waiting) < 2:
            waiting = [view async for view in admin.parked(subject, "g", retrying=True)]
            await asyncio.sleep(0.05)
        (view,) = waiting
        assert (view.key, view.tries, view.messages, view.is_dead) == (None, 1, 2, False)
        assert view.failure is not None
        assert view.next_ms is not None
        assert 20_000 <= view.next_ms - view.failure.at_ms <= 61_000
        listed = await asyncio.to_thread(
            run_keylane, "parked", "list", subject, "g", "--meta", shared_cluster.meta
        )
        assert "waits for retry" in listed.stdout
        assert [view async for view in admin.parked(subject, "g")] == []


async def test_dead_letters_of_one_key_are_retried_alone(shared_cluster: Cluster):
    """Those that fail again are dead letters as before; those of other keys stay where they are."""
    subject, handler = "dead-one-key", Handler()
    await shared_cluster.create(subject, partitions=1)
    handler.poison = {b"bad", b"worse"}
    async with (
        asyncio.timeout(60),
        Producer(shared_cluster.meta) as producer,
        Admin(shared_cluster.meta) as admin,
        consumer_of(shared_cluster, subject, handler, on_failure="dead", tries_max=1),
    ):
        await send(producer, subject, b"bad", 0, 1)
        await send(producer, subject, b"worse", 0, 1)

        async def dead(count: int) -> None:
            seen = -1
            while seen != count:
                views = [view async for view in admin.parked(subject, "g", dead=True)]
                seen = sum(view.messages for view in views)
                await asyncio.sleep(0.05)

        await dead(4)
        tried = len(handler.tried)
        await admin.redrive(subject, "g", key=b"worse", dead=True)
        await eventually(lambda: len(handler.tried) == tried + 2)
        await dead(4)
        handler.poison = {b"worse"}
        await admin.redrive(subject, "g", key=b"bad", dead=True)
        await eventually(lambda: handler.handled[b"bad"] == [0, 1])
        await dead(2)
        assert handler.handled[b"worse"] == []
