"""Handlers that end otherwise than they should: cancelled by themselves, deaf to a cancellation, crashing."""

from __future__ import annotations

import asyncio
import logging
import random

import pytest

from cluster import eventually
from keylane.consumer import workers as workers_module
from keylane.consumer.room import Room
from keylane.consumer.workers import Handler, Workers
from keylane.protocol.backoff import Backoff
from keylane.protocol.clock import SystemClock
from keylane.protocol.message import Message


class Client:
    """What workers need of a pull client."""

    deadline_ns = 2**62
    left_ms = 60_000

    def __init__(self, partition_id: int = 1) -> None:
        self.partition_id = partition_id
        self.holder = self
        self.handled: list[int] = []
        self.room = Room()

    def done(self, offset: int) -> None:
        self.handled.append(offset)
        self.room.leave(1)

    def forget(self, count: int) -> None:
        self.room.leave(count)

    async def settled(self) -> None:
        await self.room.empty()


def give(workers: Workers, client: Client, *offsets: int) -> None:
    client.room.count += len(offsets)
    workers.put(
        [Message("s", b"k", b"", one, client.partition_id, 0, delivery=client) for one in offsets]
    )


def workers_of(handler: Handler, crashed: list[BaseException]) -> Workers:
    return Workers(
        handler,
        concurrency=1,
        handover_ms=0,
        backoff=Backoff(first_ms=1, max_ms=1),
        clock=SystemClock(),
        dice=random.Random(1),
        on_crash=crashed.append,
    )


async def test_a_handler_that_was_cancelled_by_its_own_work_is_tried_again():
    """A cancellation that nobody asked for is a failure as any other: the message is not lost, nor the worker."""
    crashed: list[BaseException] = []
    client = Client()

    async def handle(message: Message) -> None:
        if message.attempt < 3:
            raise asyncio.CancelledError

    workers = workers_of(handle, crashed)
    give(workers, client, 0, 1)
    await eventually(lambda: client.handled == [0, 1])
    await workers.close()
    assert not crashed


async def test_a_handler_that_goes_on_after_its_cancellation_holds_its_partition(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    """The hand-over says so once, and ends only when the handler has; the worker is as good as before."""
    monkeypatch.setattr(workers_module, "PATIENCE_MS", 10)
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

    workers = workers_of(handle, crashed)
    give(workers, client, 7, 8)
    await asyncio.sleep(0)
    with caplog.at_level(logging.WARNING, "keylane.consumer"):
        quiesced = asyncio.create_task(workers.quiesce(client))
        await eventually(lambda: deaf and caplog.messages)
        give(workers, other, 0)
        await asyncio.sleep(0.05)
        assert not quiesced.done()
        assert len(caplog.messages) == 1
    assert "partition 1 offset 7, key b'k', was cancelled" in caplog.messages[0]
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

    workers = workers_of(handle, crashed)
    give(workers, client, 0, 1)
    await eventually(lambda: crashed)
    await asyncio.wait_for(workers.quiesce(client), 30)
    assert client.handled == []
    await workers.close()
