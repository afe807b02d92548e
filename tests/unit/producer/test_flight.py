"""When executors send: at the end of a turn of the event loop, or as soon as a lone message is
awaited.
"""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import AsyncIterator

import pytest

from keylane.producer import Producer
from keylane.producer.flight import SendScheduler
from keylane.producer.outgoing_batch import OutgoingBatch
from keylane.producer.send_future import SendFuture
from keylane.protocol.routing import OrderStrategy
from support.scripted_network import ScriptedNetwork, producer_on, route_over

FIRST, SECOND = b"k0", b"k1"
"""Keys of two partitions."""


@pytest.fixture
async def producer() -> AsyncIterator[Producer]:
    """A producer that has sent single messages, to two partitions."""
    network = ScriptedNetwork()
    network.route = route_over(
        {1: (0, 512), 2: (512, 1024)}, version=1, strategy=OrderStrategy.STRICT
    )
    async with producer_on(network) as producer:
        for key in (FIRST, SECOND, FIRST, SECOND):
            await producer.send("s", b"", key=key)
        yield producer
    assert set(network.stored) == {1, 2}


def begin_to_wait(future: SendFuture) -> None:
    """What `await future` does in this turn of the event loop."""
    next(future.__await__())


async def test_lone_message_is_sent_where_it_is_awaited(producer: Producer) -> None:
    """A program that sends one message after the other waits a turn less for each."""
    sent = producer.send("s", b"", key=FIRST)
    assert sent._batch.send_count == 0
    begin_to_wait(sent)
    assert sent._batch.send_count == 1
    await sent


async def test_messages_that_are_awaited_in_one_turn_leave_together(producer: Producer) -> None:
    """Only the first wait of a turn sends, and none in the turn after one with several messages."""
    for early in (1, 0):
        sent = []
        for key in (FIRST, SECOND, SECOND):
            sent.append(producer.send("s", b"", key=key))
            begin_to_wait(sent[-1])
        assert [each._batch.send_count for each in sent] == [early, 0, 0]
        await asyncio.sleep(0)
        assert [each._batch.send_count for each in sent] == [1, 1, 1]
        await asyncio.gather(*sent)


async def test_many_tasks_that_await_each_message_share_batches(producer: Producer) -> None:
    """What each of them sends does not become a batch of its own."""
    batches = set()

    async def send_some() -> None:
        for _ in range(5):
            sent = producer.send("s", b"", key=FIRST)
            batches.add(sent._batch)
            await sent

    await asyncio.gather(*(send_some() for _ in range(100)))
    assert len(batches) <= 10


class CountingExecutor:
    """An executor that counts how often it is pushed."""

    def __init__(self) -> None:
        self.open = OutgoingBatch(asyncio.get_running_loop())
        self.wait_is_over = False
        self.gathering: CountingChannel | None = None
        self.pushes = 0

    def push(self) -> None:
        self.pushes += 1


async def test_turn_pushes_what_is_due_when_its_end_fails() -> None:
    """The fault goes to the event loop."""

    def end() -> None:
        raise MemoryError

    loop, executor, told = asyncio.get_running_loop(), CountingExecutor(), []
    loop.set_exception_handler(lambda _, context: told.append(context["exception"]))
    scheduler = SendScheduler(loop, end)
    scheduler.schedule(executor)
    await asyncio.sleep(0)
    assert executor.pushes == 1
    assert [type(fault) for fault in told] == [MemoryError]


class CountingChannel:
    """A channel that counts how often it is flushed; a broken one raises then."""

    def __init__(self, *, broken: bool) -> None:
        self._broken = broken
        self.flushes = 0

    def gather(self) -> None: ...

    def flush(self) -> None:
        self.flushes += 1
        if self._broken:
            raise MemoryError


async def test_turn_flushes_other_channels_when_one_fails() -> None:
    """A channel that is not flushed would keep all small messages from there on."""
    loop, told = asyncio.get_running_loop(), []
    loop.set_exception_handler(lambda _, context: told.append(context["exception"]))
    scheduler, channels = SendScheduler(loop, lambda: None), []
    for broken in (True, False):
        executor = CountingExecutor()
        executor.gathering = CountingChannel(broken=broken)
        channels.append(executor.gathering)
        scheduler.schedule(executor)
    await asyncio.sleep(0)
    assert [channel.flushes for channel in channels] == [1, 1]
    assert [type(fault) for fault in told] == [MemoryError]


async def test_turn_forgets_brokers_that_no_executor_sends_to() -> None:
    """They come back at other addresses."""
    scheduler = SendScheduler(asyncio.get_running_loop(), lambda: None)
    flight = scheduler.get_load("b:1")
    assert scheduler.get_load("b:1") is flight
    forgotten = weakref.ref(scheduler.get_load("b:2"))
    gc.collect()
    assert forgotten() is None
    assert list(scheduler._broker_loads) == ["b:1"]
