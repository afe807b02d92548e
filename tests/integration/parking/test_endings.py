"""A handler that ends its consumer, and with it the process, has tried its message: the next owner
counts on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from signal import SIGTERM
from typing import Any

import pytest

from integration.parking.test_parked_keys import brokers_of, send
from keylane import Consumer, ConsumerSettings, Message, Producer
from keylane.protocol.errors import ClosedError, ConfigError
from keylane.sync import Consumer as SyncConsumer
from support.cluster import Cluster, eventually
from support.consumer_options import consumer_options
from support.handling import Crash

Tried = list[tuple[bytes, int]]
BAD = b"bad"


def consumer_kinds(meta: str, subject: str) -> dict[str, Any]:
    return {"meta": meta, "subject": subject, "group": "g", "on_failure": "park", "tries_max": 3}


async def run_coroutine(given: dict[str, Any], tried: Tried, error: type[BaseException]) -> None:
    async def handle(message: Message) -> None:
        tried.append((message.key, message.attempt))
        await asyncio.sleep(0)
        if message.key == BAD:
            raise error(1)

    await Consumer(**given, handler=handle).run()


async def run_thread(given: dict[str, Any], tried: Tried, error: type[BaseException]) -> None:
    def handle(message: Message) -> None:
        tried.append((message.key, message.attempt))
        if message.key == BAD:
            raise error(1)

    await Consumer(**consumer_options(**given, handler=handle, threads=2)).run()


async def run_batch(given: dict[str, Any], tried: Tried, error: type[BaseException]) -> None:
    async def handle(messages: list[Message]) -> None:
        tried.extend((message.key, message.attempt) for message in messages)
        if any(message.key == BAD for message in messages):
            raise error(1)

    await Consumer(**consumer_options(**given, batch_handler=handle, max_records=16)).run()


async def run_loop(given: dict[str, Any], tried: Tried, error: type[BaseException]) -> None:
    async with Consumer(**given) as consumer:
        async for message in consumer:
            tried.append((message.key, message.attempt))
            if message.key == BAD:
                raise error(1)
            await message.ack()


async def run_blocking_loop(
    given: dict[str, Any], tried: Tried, error: type[BaseException]
) -> None:
    def consume() -> None:
        with SyncConsumer(**given) as consumer:
            for message in consumer:
                tried.append((message.key, message.attempt))
                if message.key == BAD:
                    raise error(1)
                message.ack()
                if message.key == b"last":
                    return

    await asyncio.to_thread(consume)


Manner = Callable[[dict[str, Any], Tried, type[BaseException]], Awaitable[None]]


@pytest.mark.parametrize(
    ("manner", "error"),
    [
        (run_coroutine, Crash),
        (run_coroutine, SystemExit),
        (run_thread, Crash),
        (run_thread, SystemExit),
        (run_batch, Crash),
        (run_batch, SystemExit),
        (run_loop, Crash),
        (run_loop, SystemExit),
        (run_loop, ValueError),
        (run_blocking_loop, Crash),
    ],
)
async def test_key_is_parked_when_its_handler_ended_the_consumer_too_often(
    shared_cluster: Cluster, manner: Manner, error: type[BaseException]
):
    """The third end parks it; the fourth consumer goes on without it."""
    subject, tried = f"ends-{manner.__name__}-{error.__name__}", []
    await shared_cluster.create(subject, partitions=1)
    given = consumer_kinds(shared_cluster.meta, subject)
    async with (
        asyncio.timeout(60),
        Producer(shared_cluster.meta) as producer,
        brokers_of(shared_cluster, subject) as brokers,
    ):
        await send(producer, subject, BAD, 0, 1)
        await send(producer, subject, b"good", 0)
        for _ in range(3):
            with pytest.raises(error):
                await manner(given, tried, error)
        assert next(attempt for key, attempt in tried if key == BAD) == 1
        assert max(attempt for key, attempt in tried if key == BAD) == 3
        fourth = asyncio.ensure_future(manner(given, tried, error))
        await send(producer, subject, b"last", 0)
        await eventually(lambda: (b"last", 1) in tried)
        while await brokers.count() < 2:
            await asyncio.sleep(0.02)
        ((_, page),) = (await brokers.parked()).items()
        (view,) = page.keys
        assert (view.key_hex, view.messages) == (BAD.hex(), 2)
        assert view.failure is not None
        assert (view.failure.kind, view.failure.attempts) == (error.__name__, 3)
        fourth.cancel()
        await asyncio.gather(fourth, return_exceptions=True)
    assert any(key == b"good" for key, _ in tried)


async def test_message_in_hand_has_no_try_when_a_cancellation_ends_its_consumer(
    shared_cluster: Cluster,
):
    """As a SIGTERM does: neither that of a handler, nor that of a loop, nor one of several in
    hand.
    """
    subject, begun = "ends-cleanly", asyncio.Event()
    await shared_cluster.create(subject, partitions=1)
    given = consumer_kinds(shared_cluster.meta, subject)
    attempts = []
    signals = [KeyboardInterrupt(), SystemExit(), SystemExit(128 + SIGTERM)]

    async def hang(message: Message) -> None:
        attempts.append(message.attempt)
        begun.set()
        await asyncio.sleep(600)

    async def be_signaled(message: Message) -> None:
        attempts.append(message.attempt)
        raise signals.pop()

    async def iterate() -> None:
        async with Consumer(**given) as consumer:
            async for message in consumer:
                await hang(message)

    async def take_both() -> None:
        async with Consumer(**given) as consumer:
            messages: list[Message] = []
            while len(messages) < 2:
                messages += await consumer.getmany()
            attempts.extend(message.attempt for message in messages)
            raise ValueError("of which message?")

    async with asyncio.timeout(60), Producer(shared_cluster.meta) as producer:
        await send(producer, subject, b"a", 0)
        await send(producer, subject, b"b", 0)
        handled = Consumer(**consumer_options(**given, handler=hang, concurrency=1))
        for consume in (handled.run, iterate):
            begun.clear()
            running = asyncio.create_task(consume())
            await begun.wait()
            running.cancel()
            with pytest.raises(asyncio.CancelledError):
                await running
        while signals:
            with pytest.raises(type(signals[-1])):
                await Consumer(
                    **given, handler=be_signaled, settings=ConsumerSettings(concurrency=1)
                ).run()
        with pytest.raises(ValueError, match="of which"):
            await take_both()
        with pytest.raises(KeyboardInterrupt):
            await run_loop_of_a(given, attempts)
        async with Consumer(**given) as consumer:
            attempts.append((await anext(aiter(consumer))).attempt)
    assert set(attempts) == {1}


async def run_loop_of_a(given: dict[str, Any], attempts: list[int]) -> None:
    """A Ctrl-C arrives in the body of a loop."""
    async with Consumer(**given) as consumer:
        async for message in consumer:
            attempts.append(message.attempt)
            raise KeyboardInterrupt


async def test_consumer_closes_when_its_error_cannot_be_noted(
    shared_cluster: Cluster, monkeypatch: pytest.MonkeyPatch
):
    """Else it would hold its partitions for as long as the program runs."""

    def fail(_consumer: Consumer, _error: BaseException | None) -> None:
        raise ZeroDivisionError

    await shared_cluster.create("ends-unnoted", partitions=1)
    consumer = Consumer(**consumer_kinds(shared_cluster.meta, "ends-unnoted"))
    monkeypatch.setattr(Consumer, "_note_error", fail)
    with pytest.raises(ZeroDivisionError):
        async with consumer:
            pass
    with pytest.raises(ClosedError):
        await consumer.getmany()


class QueueOfGreenlets:
    """A queue of greenlets in a real thread, as of gevent's patch_all(thread=False)."""

    def get(self) -> None:
        raise RuntimeError("This operation would block forever")

    def put(self, _job: object) -> None:
        """It reaches no thread."""


async def test_no_key_is_parked_when_its_handler_has_no_thread(
    shared_cluster: Cluster, monkeypatch: pytest.MonkeyPatch
):
    """The consumer ends with advice; three of them park nothing, and the next one begins with the
    first try.
    """
    subject, tried = "ends-without-threads", []
    await shared_cluster.create(subject, partitions=1)
    given = consumer_kinds(shared_cluster.meta, subject) | {
        "settings": ConsumerSettings(handover_ms=100)
    }
    async with asyncio.timeout(60), Producer(shared_cluster.meta) as producer:
        await send(producer, subject, b"last", 0)
        with monkeypatch.context() as patch:
            patch.setattr("keylane.consumer.dispatch.threads.SimpleQueue", QueueOfGreenlets)
            for _ in range(3):
                with pytest.raises(ConfigError, match="patch both threads and queues"):
                    await run_thread(given, tried, Crash)
        assert tried == []
        running = asyncio.create_task(run_thread(given, tried, Crash))
        await eventually(lambda: tried)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    assert tried == [(b"last", 1)]
