"""Handlers that cancel themselves, ignore a cancellation, crash, or end with GeneratorExit."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from keylane.consumer.dispatch import workers as workers_module
from keylane.consumer.dispatch.handlers import Handler
from keylane.protocol.errors import Reason
from keylane.protocol.message import Message
from support.cluster import eventually
from support.handling import Client, Crash, workers_of


async def check_tried_again(handler: Handler) -> None:
    """Check that the only worker handles three messages of two keys, however often their handlers
    fail first.
    """
    crashed: list[BaseException] = []
    client = Client()
    workers = workers_of(handler, crashed=crashed)
    client.give(workers, b"k", b"k", b"other")
    await eventually(lambda: sorted(client.handled) == [0, 1, 2])
    await workers.close()
    assert not crashed


async def test_handler_cancelled_by_its_own_work_is_tried_again():
    """A CancelledError without a request is an ordinary failure: neither the message nor the worker
    is lost.
    """

    async def handle(message: Message) -> None:
        if message.attempt < 3:
            raise asyncio.CancelledError

    await check_tried_again(handle)


async def test_handler_that_ignores_its_cancellation_delays_the_hand_over(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    """The hand-over logs that once and waits for the handler; then the worker runs other
    handlers.
    """
    monkeypatch.setattr(workers_module, "CANCEL_WARN_MS", 10)
    crashed: list[BaseException] = []
    client, other = Client(1), Client(2)
    gate = asyncio.Event()
    deaf = False

    async def handle(message: Message) -> None:
        nonlocal deaf
        if message.partition_id == 1:
            try:
                await gate.wait()
            except asyncio.CancelledError:
                deaf = True
                await gate.wait()
        elif message.attempt == 1:
            raise asyncio.CancelledError

    workers = workers_of(handle, crashed=crashed)
    client.give(workers, b"k", b"k", start=7)
    await asyncio.sleep(0.01)
    with caplog.at_level(logging.WARNING, "keylane.consumer"):
        quiesced = asyncio.create_task(client.hand_over())
        await eventually(lambda: deaf and caplog.messages)
        other.give(workers, b"k")
        await asyncio.sleep(0.05)
        assert not quiesced.done()
        assert len(caplog.messages) == 1
    digest = "key digest ac52cb5ff985d463"
    assert f"s partition 1 offset 7 in group billing ({digest}) was cancelled" in caplog.messages[0]
    gate.set()
    await quiesced
    assert client.handled == [7], "what waited behind it is forgotten"
    await eventually(lambda: other.handled == [0])
    await workers.close()
    assert not crashed


async def test_crashed_handler_delays_no_hand_over():
    """The message of a worker that has ended is dropped."""

    crashed: list[BaseException] = []
    client = Client()

    async def handle(message: Message) -> None:
        raise Crash

    workers = workers_of(handle, crashed=crashed)
    client.give(workers, b"k", b"k")
    await eventually(lambda: crashed)
    await asyncio.wait_for(client.hand_over(), 30)
    assert client.handled == []
    await workers.close()


@pytest.mark.parametrize("waits", [False, True])
async def test_handler_that_raises_generator_exit_is_tried_again(waits: bool):
    """A GeneratorExit is an ordinary failure, whether or not the handler has awaited something."""

    async def handle(message: Message) -> None:
        if waits:
            await asyncio.sleep(0)
        if message.attempt < 3:
            raise GeneratorExit

    await check_tried_again(handle)


async def end_with_generator_exit(message: Message) -> None:
    """Raise GeneratorExit in a task in the first three attempts."""
    await asyncio.sleep(0)
    if message.attempt < 4:
        raise GeneratorExit


async def test_returned_task_that_ends_with_generator_exit_is_tried_again():
    """A plain await of such a task would close the worker."""
    await check_tried_again(lambda message: asyncio.create_task(end_with_generator_exit(message)))


@pytest.mark.parametrize("ignores", [False, True])
async def test_handler_awaiting_a_task_ended_by_generator_exit_is_tried_again(ignores: bool):
    """The event loop closes the awaiting handler; the worker continues, in first attempts and
    retries.
    """

    async def handle(message: Message) -> None:
        try:
            await asyncio.create_task(end_with_generator_exit(message))
        except GeneratorExit:
            if ignores:
                await asyncio.sleep(0)
            raise

    await check_tried_again(handle)


async def test_message_ended_by_generator_exit_is_given_up_after_its_lease():
    """The message and the next one of its key are dropped; the worker runs handlers of other
    partitions.
    """
    crashed: list[BaseException] = []
    client, other = Client(1), Client(2)

    async def work() -> None:
        await asyncio.sleep(0)
        client.lose()
        raise GeneratorExit

    async def handle(message: Message) -> None:
        if message.partition_id == 1:
            await asyncio.create_task(work())

    workers = workers_of(handle, crashed=crashed)
    client.give(workers, b"k", b"k")
    await eventually(lambda: client.held == 0)
    other.give(workers, b"k")
    await eventually(lambda: other.handled == [0])
    await workers.close()
    assert not crashed
    assert client.handled == []


async def test_returned_task_is_cancelled_with_its_handler():
    """A hand-over cancels the task that the handler returned, and waits until it has ended."""
    client = Client()
    ends: list[str] = []

    async def work() -> None:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            await asyncio.sleep(0.01)
            ends.append("cancelled")
            raise

    workers = workers_of(lambda message: asyncio.create_task(work()), crashed=[])
    client.give(workers, b"k")
    await asyncio.sleep(0.01)
    await client.hand_over()
    assert ends == ["cancelled"]
    assert client.handled == []
    await workers.close()


async def test_message_is_handled_when_its_returned_task_ends_just_before_the_cancellation():
    """What is known to be handled is acked, so that the next owner does not handle it again."""
    client = Client()
    gate = asyncio.Event()

    async def work() -> None:
        await gate.wait()

    workers = workers_of(lambda message: asyncio.create_task(work()), crashed=[])
    client.give(workers, b"k")
    await asyncio.sleep(0.01)
    gate.set()  # the task runs in the next iteration of the event loop, its worker later
    await client.hand_over()
    assert client.handled == [0]
    await workers.close()


async def test_hand_over_waits_for_a_returned_future_whose_thread_runs():
    """A thread cannot be cancelled, so the partition stays until it has ended."""
    client = Client()
    begun, gate = threading.Event(), threading.Event()

    def work() -> None:
        begun.set()
        gate.wait()

    with ThreadPoolExecutor(1) as pool:
        workers = workers_of(lambda message: pool.submit(work), crashed=[])
        client.give(workers, b"k")
        await eventually(begun.is_set)
        quiesced = asyncio.create_task(client.hand_over())
        await asyncio.sleep(0.05)
        is_waiting = not quiesced.done()
        gate.set()
        await quiesced
        assert is_waiting
        assert client.handled == [0]
        await workers.close()


async def test_worker_closed_from_outside_ends():
    """A GeneratorExit from closing the worker's own coroutine is not a failure of the handler."""
    client = Client()
    gate = asyncio.Event()
    ends: list[str] = []

    async def handle(message: Message) -> None:
        try:
            await gate.wait()
        except GeneratorExit:
            ends.append("closed")
            raise

    workers = workers_of(handle)
    client.give(workers, b"k")
    await asyncio.sleep(0.01)
    task = workers.workers[0].task
    assert task is not None
    task.get_coro().close()  # type: ignore[union-attr]
    assert ends == ["closed"]
    task.cancel()
    await workers.close()


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
async def test_handler_that_ends_the_program_ends_the_consumer_first(kind: type[BaseException]):
    """The consumer hands over while the event loop is still running."""
    crashed: list[BaseException] = []
    client = Client()
    gate = asyncio.Event()
    begun: list[int] = []

    async def handle(message: Message) -> None:
        begun.append(message.offset)
        await gate.wait()
        if message.key == b"last":
            raise kind
        await asyncio.sleep(0.01)

    workers = workers_of(handle, crashed=crashed, concurrency=2)
    client.give(workers, b"a", b"last", b"b", b"last")
    await eventually(lambda: len(begun) == 2)
    gate.set()
    await eventually(lambda: crashed)
    assert isinstance(crashed[0], kind)
    assert client.handled == []
    await eventually(lambda: client.handled == [0])
    await asyncio.wait_for(client.hand_over(), 30)
    assert client.held == 0
    await workers.close()
    assert len(crashed) == 1


@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit, Crash])
@pytest.mark.parametrize("count", [1, 3])
async def test_no_handler_begins_when_one_has_ended_the_program(
    kind: type[BaseException], batched: bool, count: int
):
    """Not even with the same message, or with messages of another partition."""
    crashed: list[BaseException] = []
    client, other = Client(), Client(2)
    begun: list[tuple[int, int]] = []

    async def handle(message: Message) -> None:
        begun.append((message.partition_id, message.offset))
        raise kind

    async def handle_all(messages: list[Message]) -> None:
        await handle(messages[0])

    handler: Any = handle_all if batched else handle
    workers = workers_of(handler, batched=batched, crashed=crashed, concurrency=count)
    client.give(workers, b"a", b"a", b"b", b"")
    await eventually(lambda: crashed)
    other.give(workers, b"c")
    await asyncio.sleep(0.05)
    assert begun == [(1, 0)]
    assert client.held == 4
    for each in (client, other):
        await asyncio.wait_for(each.hand_over(), 30)
        assert (each.held, each.handled) == (0, [])
    await workers.close()
    assert len(crashed) == 1


async def test_messages_that_are_acked_begin_when_a_handler_has_ended_the_program():
    """With the ack before the handler nobody else would get them."""
    crashed: list[BaseException] = []
    client = Client()
    begun: list[int] = []

    async def handle(message: Message) -> None:
        begun.append(message.offset)
        if not message.offset:
            raise Crash

    workers = workers_of(handle, crashed=crashed, concurrency=2, ack="before")
    client.give(workers, b"a", b"b", b"c")
    await eventually(lambda: crashed and begun == [*range(client.shell.acked.cursor)])
    await asyncio.wait_for(client.hand_over(), 30)
    assert client.shell.acked.cursor == len(begun) == 2
    await workers.close()


async def cancel_first(message: Message) -> None:
    """Cancel the current task at once, with a timer, or with an error; each once."""
    task = asyncio.current_task()
    assert task is not None
    if message.attempt > 1 or not message.key.startswith(b"cancels"):
        await asyncio.sleep(0.001)
        return
    if message.key == b"cancels later":
        asyncio.get_running_loop().call_later(0.002, task.cancel)
    else:
        task.cancel()
    if message.key == b"cancels and fails":
        raise ValueError("no")
    if message.key in {b"cancels and waits", b"cancels later"}:
        await asyncio.sleep(60)


CANCELS = [b"cancels", b"cancels later", b"cancels and waits", b"cancels and fails"]


@pytest.mark.parametrize("concurrency", [1, 3])
@pytest.mark.parametrize("key", CANCELS)
async def test_handler_that_cancels_its_own_task_is_tried_again(key: bytes, concurrency: int):
    """The worker continues, and leftover requests cancel no later handler."""
    crashed: list[BaseException] = []
    client = Client()
    attempts: list[tuple[bytes, int]] = []

    async def handle(message: Message) -> None:
        attempts.append((message.key, message.attempt))
        await cancel_first(message)

    workers = workers_of(handle, crashed=crashed, concurrency=concurrency)
    client.give(workers, key, b"a", b"b", b"c")
    await eventually(lambda: sorted(client.handled) == [0, 1, 2, 3])
    assert sorted(attempts) == sorted([(key, 1), (key, 2), (b"a", 1), (b"b", 1), (b"c", 1)])
    for worker in workers.workers:
        assert worker.task is not None
        assert not worker.task.cancelling()
    await workers.close()
    assert not crashed


@pytest.mark.parametrize("batched", [False, True])
async def test_failure_of_a_task_group_is_a_try_when_an_earlier_handler_was_cancelled(
    batched: bool,
):
    """From Python 3.13 on, a task group raises a pending cancel request instead of its errors."""
    crashed: list[BaseException] = []
    client = Client()
    attempts: list[tuple[bytes, int]] = []

    async def fail() -> None:
        raise ValueError("no such customer")

    async def handle(message: Message) -> None:
        attempts.append((message.key, message.attempt))
        if message.key == b"slow":
            task = asyncio.current_task()
            assert task is not None
            asyncio.get_running_loop().call_later(0.002, task.cancel)
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(60)
        elif message.attempt == 1:
            async with asyncio.TaskGroup() as group:
                group.create_task(fail())
                group.create_task(asyncio.sleep(60))

    async def handle_all(messages: list[Message]) -> None:
        for message in messages:
            await handle(message)

    handler: Any = handle_all if batched else handle
    workers = workers_of(handler, batched=batched, crashed=crashed, max_records=1)
    client.give(workers, b"slow", b"group")
    await eventually(lambda: sorted(client.handled) == [0, 1])
    assert attempts == [(b"slow", 1), (b"group", 1), (b"group", 2)]
    await workers.close()
    assert not crashed


async def test_cancel_that_a_handler_left_on_a_timer_ends_no_idle_worker():
    client = Client()
    crashed: list[BaseException] = []

    async def handle(message: Message) -> None:
        task = asyncio.current_task()
        assert task is not None
        asyncio.get_running_loop().call_later(0.002, task.cancel)

    workers = workers_of(handle, crashed=crashed)
    client.give(workers, b"k")
    await asyncio.sleep(0.02)
    client.give(workers, b"l")
    await eventually(lambda: len(client.handled) == 2)
    await workers.close()
    assert not crashed


async def test_consumer_ends_when_the_tasks_of_the_whole_event_loop_are_cancelled(
    monkeypatch: pytest.MonkeyPatch,
):
    """Workers end, because the end of the program waits for them; if the program continues, the
    consumer fails.
    """
    monkeypatch.setattr(workers_module, "CANCELLED_WAIT_S", 0.01)
    crashed: list[BaseException] = []
    client = Client()

    async def handle(_message: Message) -> None:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(60)

    workers = workers_of(handle, crashed=crashed)
    client.give(workers, b"k")
    await asyncio.sleep(0.01)
    for task in asyncio.all_tasks() - {asyncio.current_task()}:
        task.cancel()
    await eventually(lambda: crashed)
    assert crashed[0].reason is Reason.WORKER_CANCELLED
    await asyncio.wait_for(client.hand_over(), 30)
    await workers.close()
