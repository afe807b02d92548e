"""`handler_timeout_ms`: a handler that does not return is cancelled, and its try counts as failed,
in every kind of group.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest

from keylane import Admin, Consumer, ConsumerSettings, Message, Producer
from keylane.testing import VirtualCluster, run
from support.consumer_options import consumer_options

KINDS = pytest.mark.parametrize("strategy", ["exclusive", "shared"])


class LateHandlers:
    """Handlers that never return for some messages."""

    def __init__(self, cluster: VirtualCluster) -> None:
        self._cluster = cluster
        self.begun: list[tuple[bytes, int, float]] = []
        self.cancelled: list[float] = []
        self.done: list[bytes] = []

    async def one(self, message: Message) -> None:
        self.begun.append((message.value, message.attempt, self._cluster.now_s))
        if message.value.startswith(b"hang"):
            try:
                await asyncio.sleep(100_000)
            except asyncio.CancelledError:
                self.cancelled.append(self._cluster.now_s)
                raise
        self.done.append(message.value)

    async def many(self, messages: list[Message]) -> None:
        for message in messages:
            await self.one(message)

    def tries(self, value: bytes) -> list[int]:
        return [attempt for each, attempt, _ in self.begun if each == value]


async def send(cluster: VirtualCluster, *values: bytes) -> None:
    """Each value has its own key."""
    async with Producer(cluster.address) as producer:
        for value in values:
            await producer.send("s", value, key=value)


async def set_aside(cluster: VirtualCluster) -> list[tuple[str, int]]:
    """(kind of the failure, its tries) of each message; those without a key have one view."""
    async with Admin(cluster.address) as admin:
        views = [view async for view in admin.parked("s", "g", dead=None)]
    return [
        (view.failure.kind, view.failure.attempts)
        for view in views
        if view.failure is not None
        for _ in range(view.messages)
    ]


@KINDS
@pytest.mark.parametrize("batch", [False, True], ids=["handler", "batch"])
def test_consumer_goes_on_when_all_its_handlers_hang(strategy: str, batch: bool):
    """After `tries_max` time-outs each message is set aside, with the typed error; others are
    handled meanwhile.
    """

    async def story(cluster: VirtualCluster) -> None:
        await cluster.create_subject("s", partitions=1)
        hanging = LateHandlers(cluster)
        handlers: dict[str, Any] = (
            {"batch_handler": hanging.many, "max_records": 1} if batch else {"handler": hanging.one}
        )
        consumer = Consumer(
            cluster.address,
            **consumer_options(
                subject="s",
                group="g",
                settings=ConsumerSettings(
                    consume_strategy=strategy, concurrency=4, handler_timeout_ms=20_000
                ),
                on_failure="park" if strategy == "exclusive" else "dead",
                tries_max=2,
                **handlers,
            ),
        )
        async with consumer:
            await send(cluster, *(b"hang%d" % number for number in range(4)))
            began_s = cluster.now_s
            await asyncio.sleep(10)
            await send(cluster, *(b"good%d" % number for number in range(20)))
            await asyncio.sleep(20)
            assert len(hanging.done) == 20
            assert 18 <= min(hanging.cancelled) - began_s <= 23
            await asyncio.sleep(300)
        assert all(hanging.tries(b"hang%d" % number) == [1, 2] for number in range(4))
        assert await set_aside(cluster) == [("HandlerTimeoutError", 2)] * 4

    run(story, seed=7)


@KINDS
def test_message_is_lost_when_its_handler_times_out_and_it_was_acked_before(
    strategy: str, caplog: pytest.LogCaptureFixture
):
    async def story(cluster: VirtualCluster) -> None:
        await cluster.create_subject("s", partitions=1)
        hanging = LateHandlers(cluster)
        consumer = Consumer(
            cluster.address,
            subject="s",
            group="g",
            settings=ConsumerSettings(
                consume_strategy=strategy, concurrency=1, handler_timeout_ms=20_000
            ),
            ack="before",
            handler=hanging.one,
        )
        async with consumer:
            await send(cluster, b"hang", b"good")
            await asyncio.sleep(60)
        assert hanging.tries(b"hang") == [1]
        assert hanging.done == [b"good"]

    with caplog.at_level(logging.ERROR, logger="keylane.consumer"):
        run(story, seed=7)
    (record,) = caplog.records
    assert "HandlerTimeoutError" in record.getMessage()
    assert "1 message is lost" in record.getMessage()


def test_broadcast_handler_is_tried_again_when_it_times_out():
    async def story(cluster: VirtualCluster) -> None:
        await cluster.create_subject("s", partitions=1)
        tries: list[int] = []

        async def handle(message: Message) -> None:
            tries.append(message.attempt)
            if message.attempt < 3:
                await asyncio.sleep(100_000)

        settings = ConsumerSettings(handler_timeout_ms=2_000)
        async with Consumer(
            cluster.address, subject="s", handler=handle, settings=replace(settings, broadcast=True)
        ):
            await send(cluster, b"a")
            await asyncio.sleep(30)
        assert tries == [1, 2, 3]

    run(story, seed=7)


async def returns() -> None:
    with contextlib.suppress(asyncio.CancelledError):
        await asyncio.sleep(100_000)


async def returns_later() -> None:
    await returns()
    await asyncio.sleep(1)


async def takes_its_cancel_back() -> None:
    await returns()
    task = asyncio.current_task()
    assert task is not None
    task.uncancel()


async def cancels_itself_and_fails() -> None:
    await returns()
    task = asyncio.current_task()
    assert task is not None
    task.cancel()
    raise RuntimeError("the bank has gone")


ENDS = pytest.mark.parametrize(
    "end", [returns, returns_later, takes_its_cancel_back, cancels_itself_and_fails]
)


@KINDS
@pytest.mark.parametrize("batch", [False, True], ids=["handler", "batch"])
@ENDS
def test_try_has_failed_when_its_handler_takes_its_time_out_in_any_way(
    end: Callable[[], Awaitable[None]], batch: bool, strategy: str
):
    """And nothing of that reaches the next handler of the worker, whose limits are its own."""

    async def story(cluster: VirtualCluster) -> None:
        await cluster.create_subject("s", partitions=1)
        tries: list[int] = []
        done: list[tuple[bytes, int]] = []

        async def handle(message: Message) -> None:
            if message.value == b"late":
                tries.append(message.attempt)
                await end()
                return
            await asyncio.sleep(0.01)
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(1):
                    await asyncio.sleep(10)
            done.append((message.value, message.attempt))

        async def handle_all(messages: list[Message]) -> None:
            for message in messages:
                await handle(message)

        handlers: dict[str, Any] = (
            {"batch_handler": handle_all, "max_records": 1} if batch else {"handler": handle}
        )
        async with Consumer(
            cluster.address,
            **consumer_options(
                subject="s",
                group="g",
                settings=ConsumerSettings(
                    consume_strategy=strategy, concurrency=1, handler_timeout_ms=5_000
                ),
                on_failure="dead",
                tries_max=2,
                **handlers,
            ),
        ):
            await send(cluster, b"late", b"next", b"last")
            await asyncio.sleep(60)
        assert tries == [1, 2]
        assert sorted(done) == [(b"last", 1), (b"next", 1)]
        assert await set_aside(cluster) == [("HandlerTimeoutError", 2)]

    run(story, seed=7)


@ENDS
def test_message_is_lost_once_when_its_handler_times_out_in_any_way_and_it_was_acked_before(
    end: Callable[[], Awaitable[None]], caplog: pytest.LogCaptureFixture
):
    async def story(cluster: VirtualCluster) -> None:
        await cluster.create_subject("s", partitions=1)
        begun: list[bytes] = []

        async def handle(message: Message) -> None:
            begun.append(message.value)
            if message.value == b"late":
                await end()

        async with Consumer(
            cluster.address,
            subject="s",
            group="g",
            handler=handle,
            settings=ConsumerSettings(concurrency=1, handler_timeout_ms=5_000),
            ack="before",
        ):
            await send(cluster, b"late", b"next")
            await asyncio.sleep(60)
        assert begun == [b"late", b"next"]

    with caplog.at_level(logging.ERROR, logger="keylane.consumer"):
        run(story, seed=7)
    (record,) = caplog.records
    assert "HandlerTimeoutError" in record.getMessage()


@pytest.mark.parametrize("ends", ["returns", "raises", "fails"])
def test_partition_is_handed_over_when_its_handlers_took_no_notice_of_their_time_outs(ends: str):
    async def story(cluster: VirtualCluster) -> None:
        await cluster.create_subject("s", partitions=2)
        begun: list[str] = []

        async def hang(_message: Message) -> None:
            begun.append("first")
            await returns()
            try:
                await asyncio.sleep(100_000)
            except asyncio.CancelledError:
                if ends == "raises":
                    raise
                if ends == "fails":
                    raise RuntimeError("the bank has gone") from None

        async def handle(_message: Message) -> None:
            begun.append("second")

        settings = ConsumerSettings(handler_timeout_ms=2_000, handover_ms=3_000)
        given: dict[str, Any] = {"subject": "s", "group": "g", "settings": settings}
        async with Consumer(
            cluster.address,
            **consumer_options(handler=hang, concurrency=8, **given),
        ):
            await send(cluster, *(b"%d" % number for number in range(8)))
            await asyncio.sleep(20)
            assert begun == ["first"] * 8
            async with Consumer(cluster.address, **consumer_options(handler=handle, **given)):
                await asyncio.sleep(20)
        assert "second" in begun
        assert begun.count("first") == 8

    run(story, seed=7)


def test_handler_that_raises_another_error_at_its_time_out_has_timed_out():
    async def story(cluster: VirtualCluster) -> None:
        await cluster.create_subject("s", partitions=1)

        async def handle(_message: Message) -> None:
            try:
                await asyncio.sleep(100_000)
            except asyncio.CancelledError:
                raise RuntimeError("the bank has gone") from None

        async with Consumer(
            cluster.address,
            subject="s",
            group="g",
            handler=handle,
            on_failure="dead",
            tries_max=1,
            settings=ConsumerSettings(handler_timeout_ms=5_000),
        ):
            await send(cluster, b"a")
            await asyncio.sleep(30)
        assert await set_aside(cluster) == [("HandlerTimeoutError", 1)]

    run(story, seed=7)


def test_error_of_a_later_try_is_its_own_when_the_first_has_timed_out():
    async def story(cluster: VirtualCluster) -> None:
        await cluster.create_subject("s", partitions=1)

        async def handle(message: Message) -> None:
            if message.attempt == 1:
                await asyncio.sleep(100_000)
            raise ValueError("no such customer")

        async with Consumer(
            cluster.address,
            subject="s",
            group="g",
            handler=handle,
            on_failure="dead",
            tries_max=2,
            settings=ConsumerSettings(concurrency=1, handler_timeout_ms=60_000),
        ):
            await send(cluster, b"a")
            await asyncio.sleep(100)
        assert await set_aside(cluster) == [("ValueError", 2)]

    run(story, seed=7)


@pytest.mark.parametrize(("given", "hangs"), [({}, False), ({"handler_timeout_ms": 0}, True)])
def test_handler_has_an_hour_unless_its_consumer_says_otherwise(given: dict, hangs: bool):
    async def story(cluster: VirtualCluster) -> None:
        await cluster.create_subject("s", partitions=1)
        hanging = LateHandlers(cluster)
        async with Consumer(
            cluster.address,
            **consumer_options(subject="s", group="g", handler=hanging.one, **given),
        ):
            await send(cluster, b"hang")
            await asyncio.sleep(3_590)
            assert hanging.cancelled == []
            await asyncio.sleep(20)
            assert hanging.cancelled == [] if hangs else len(hanging.cancelled) == 1

    run(story, seed=7, limit_s=4_000)
    assert ConsumerSettings(handler_timeout_ms=None).handler_timeout_ms == 0
