"""Handlers that end otherwise than they should: cancelled by themselves, deaf to a cancellation, crashing."""

from __future__ import annotations

import asyncio
import logging

import pytest

from keylane.consumer.handling import workers as workers_module
from keylane.protocol.errors import WorkerCancelledError
from keylane.protocol.message import Message
from support.cluster import eventually
from support.handling import Client, workers_of


async def test_a_handler_that_was_cancelled_by_its_own_work_is_tried_again():
    """A cancellation that nobody asked for is a failure as any other: the message is not lost, nor the worker."""
    crashed: list[BaseException] = []
    client = Client()

    async def handle(message: Message) -> None:
        if message.attempt < 3:
            raise asyncio.CancelledError

    workers = workers_of(handle, crashed=crashed)
    client.give(workers, b"k", b"k")
    await eventually(lambda: client.handled == [0, 1])
    await workers.close()
    assert not crashed


async def test_a_handler_that_goes_on_after_its_cancellation_holds_its_partition(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    """The hand-over says so once, and ends only when the handler has; the worker is as good as before."""
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
    await asyncio.sleep(0)
    with caplog.at_level(logging.WARNING, "keylane.consumer"):
        quiesced = asyncio.create_task(workers.quiesce(client))
        await eventually(lambda: deaf and caplog.messages)
        other.give(workers, b"k")
        await asyncio.sleep(0.05)
        assert not quiesced.done()
        assert len(caplog.messages) == 1
    digest = "key digest ac52cb5ff985d463"
    assert f"s partition 1 offset 7, {digest} was cancelled" in caplog.messages[0]
    gate.set()
    await quiesced
    assert client.handled == [7], "what waited behind it is forgotten"
    await eventually(lambda: other.handled == [0])
    await workers.close()
    assert not crashed


async def test_a_handler_that_crashes_holds_nothing_up():
    """What ends the consumer leaves no message that a hand-over would wait for."""

    class Crash(BaseException):
        """No handler's failure: the program is to end."""

    crashed: list[BaseException] = []
    client = Client()

    async def handle(message: Message) -> None:
        raise Crash

    workers = workers_of(handle, crashed=crashed)
    client.give(workers, b"k", b"k")
    await eventually(lambda: crashed)
    await asyncio.wait_for(workers.quiesce(client), 30)
    assert client.handled == []
    await workers.close()


@pytest.mark.parametrize("waits", [False, True])
async def test_a_handler_that_lets_generator_exit_out_fails_and_keeps_its_worker(waits: bool):
    """It is a failure as any other: the message is tried again, and the only worker goes on."""
    crashed: list[BaseException] = []
    client = Client()

    async def handle(message: Message) -> None:
        if waits:
            await asyncio.sleep(0)
        if message.attempt < 3:
            raise GeneratorExit

    workers = workers_of(handle, crashed=crashed)
    client.give(workers, b"k", b"k", b"other")
    await eventually(lambda: sorted(client.handled) == [0, 1, 2])
    await workers.close()
    assert not crashed


async def test_a_task_that_ends_with_generator_exit_fails_and_keeps_its_worker():
    """A handler may return a task: awaited as such, it would close whoever awaits it."""
    crashed: list[BaseException] = []
    client = Client()

    async def work(message: Message) -> None:
        await asyncio.sleep(0)
        if message.attempt < 3:
            raise GeneratorExit

    workers = workers_of(lambda message: asyncio.create_task(work(message)), crashed=crashed)
    client.give(workers, b"k", b"k", b"other")
    await eventually(lambda: sorted(client.handled) == [0, 1, 2])
    await workers.close()
    assert not crashed


@pytest.mark.parametrize("ignores", [False, True])
async def test_a_handler_that_awaits_a_task_ended_by_generator_exit_keeps_its_worker(ignores: bool):
    """The event loop closes whoever awaits such a task, handler and worker; the worker goes on, in first and later tries."""
    crashed: list[BaseException] = []
    client = Client()

    async def work(message: Message) -> None:
        await asyncio.sleep(0)
        if message.attempt < 4:
            raise GeneratorExit

    async def handle(message: Message) -> None:
        try:
            await asyncio.create_task(work(message))
        except GeneratorExit:
            if ignores:
                await asyncio.sleep(0)
            raise

    workers = workers_of(handle, crashed=crashed)
    client.give(workers, b"k", b"k", b"other")
    await eventually(lambda: sorted(client.handled) == [0, 1, 2])
    await workers.close()
    assert not crashed


async def test_a_lease_that_ended_meanwhile_gives_up_what_generator_exit_ended():
    """The message is forgotten, and the next one of its key too; the worker is there for other partitions."""
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
    await eventually(lambda: client.in_flight.count == 0)
    other.give(workers, b"k")
    await eventually(lambda: other.handled == [0])
    await workers.close()
    assert not crashed
    assert client.handled == []


async def test_a_task_that_a_handler_returned_is_cancelled_with_its_worker():
    """A hand-over that cancels the handler cancels the task that it returned, and waits for its end."""
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
    await workers.quiesce(client)
    assert ends == ["cancelled"]
    assert client.handled == []
    await workers.close()


async def test_a_worker_that_is_closed_from_outside_ends():
    """A GeneratorExit that comes because the worker's own coroutine is closed is no failure of the handler."""
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
    await asyncio.sleep(0)
    task = workers._workers[0].task
    assert task is not None
    task.get_coro().close()  # type: ignore[union-attr]
    assert ends == ["closed"]
    task.cancel()
    await workers.close()


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
async def test_a_handler_that_ends_the_program_ends_the_consumer_first(kind: type[BaseException]):
    """The consumer hears of it and hands over; the event loop is not torn down below it."""
    crashed: list[BaseException] = []
    client = Client()

    async def handle(message: Message) -> None:
        if message.key == b"last":
            raise kind

    workers = workers_of(handle, crashed=crashed, concurrency=2)
    client.give(workers, b"last", b"a", b"b")
    await eventually(lambda: crashed and sorted(client.handled) == [1, 2])
    assert isinstance(crashed[0], kind)
    await asyncio.wait_for(workers.quiesce(client), 30)
    await workers.close()


async def test_a_worker_that_its_handler_cancels_is_not_lost_silently(
    monkeypatch: pytest.MonkeyPatch,
):
    """A handler that cancels its own task ends the consumer, loudly, and what it had is not waited for."""
    monkeypatch.setattr(workers_module, "CANCELLED_WAIT_S", 0.01)
    crashed: list[BaseException] = []
    client = Client()

    async def handle(message: Message) -> None:
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        await asyncio.sleep(60)

    workers = workers_of(handle, crashed=crashed)
    client.give(workers, b"k")
    await eventually(lambda: crashed)
    assert isinstance(crashed[0], WorkerCancelledError)
    await asyncio.wait_for(workers.quiesce(client), 30)
    await workers.close()
