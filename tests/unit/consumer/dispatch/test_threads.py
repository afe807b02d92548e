"""Handlers in threads: results, errors, hand-overs that wait for them, and the end of the
program.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from typing import Any

import pytest

from keylane import NACK, Message
from keylane.consumer.dispatch.threads import HandlerThreads
from keylane.consumer.dispatch.workers import WorkerPool
from keylane.errors import ConfigError
from support.cluster import eventually
from support.handling import Client, Crash, workers_of


def threaded(
    handler: Any, count: int = 2, *, forked: bool = False, **settings: Any
) -> tuple[WorkerPool, HandlerThreads]:
    threads = HandlerThreads(handler, count, forked=lambda: forked)
    threads.start()
    workers = workers_of(threads.run, concurrency=count, **settings)
    threads.is_ending_worker = lambda: workers.is_ending_worker(asyncio.current_task())
    return workers, threads


async def test_handler_runs_in_a_thread_and_its_message_is_acked_when_it_returns():
    """NACK, errors and StopIteration cause a retry, as on the event loop."""
    tries: list[tuple[int, int, bool]] = []

    def handle(message: Message) -> Any:
        on_loop = threading.current_thread() is threading.main_thread()
        tries.append((message.offset, message.attempt, on_loop))
        if message.attempt == 1:
            if message.offset == 0:
                return NACK
            raise StopIteration if message.offset == 1 else ValueError("once")
        return message.offset

    client = Client()
    workers, threads = threaded(handle)
    client.give(workers, b"a", b"b", b"c")
    await eventually(lambda: sorted(client.handled) == [0, 1, 2])
    assert sorted(tries) == [(n, attempt, False) for n in range(3) for attempt in (1, 2)]
    await workers.close()
    threads.stop()


async def test_try_counts_as_failed_when_a_thread_takes_too_long(
    caplog: pytest.LogCaptureFixture,
):
    """It is not cancelled: it keeps its message, which is acked if the handler returns
    after all.
    """
    gate, client = threading.Event(), Client()
    workers, threads = threaded(
        lambda _message: gate.wait(60), handler_timeout_ms=50, cancels=False
    )
    with caplog.at_level(logging.WARNING, logger="keylane.consumer"):
        client.give(workers, b"a", b"a")
        await eventually(lambda: client.shell.failed)
        await asyncio.sleep(0.2)
    assert client.shell.failed == {0: 1}
    assert set(client.shell.named) == {"HandlerTimeoutError"}
    told = [(what, attempts) for _, what, attempts, _ in client.hanging]
    assert told == [("the handler did not return within 50 ms", 1)]
    assert [record.getMessage() for record in caplog.records if "50 ms" in record.getMessage()]
    assert client.handled == []
    gate.set()
    await eventually(lambda: client.handled == [0, 1])
    await workers.close()
    threads.stop()


async def test_hand_over_waits_for_a_thread_that_runs():
    """A thread cannot be cancelled: its message is acked when it ends, and the next one of its key
    is not started.
    """
    gate, begun = threading.Event(), threading.Event()

    def handle(_message: Message) -> None:
        begun.set()
        gate.wait(30)

    client = Client()
    workers, threads = threaded(handle)
    client.give(workers, b"a", b"a")
    await asyncio.to_thread(begun.wait, 30)
    quiesced = asyncio.create_task(client.hand_over())
    await asyncio.sleep(0.05)
    assert not quiesced.done()
    gate.set()
    await asyncio.wait_for(quiesced, 30)
    assert client.handled == [0]
    other = Client(2)
    other.give(workers, b"a")
    await eventually(lambda: other.handled == [0])
    await workers.close()
    threads.stop()


async def test_worker_that_is_to_end_ends_after_its_thread():
    gate, begun = threading.Event(), threading.Event()

    def handle(_message: Message) -> None:
        begun.set()
        gate.wait(30)

    client = Client()
    workers, threads = threaded(handle, 1)
    client.give(workers, b"a")
    await asyncio.to_thread(begun.wait, 30)
    closing = asyncio.create_task(workers.close())
    await asyncio.sleep(0.05)
    assert not closing.done()
    gate.set()
    await asyncio.wait_for(closing, 30)
    assert client.handled == []
    threads.stop()


@pytest.mark.parametrize("kind", [Crash, KeyboardInterrupt, SystemExit])
async def test_error_that_ends_the_program_ends_the_consumer_from_a_thread(
    kind: type[BaseException],
):
    def handle(_message: Message) -> None:
        raise kind

    crashed: list[BaseException] = []
    client = Client()
    workers, threads = threaded(handle, 1, crashed=crashed)
    client.give(workers, b"a")
    await eventually(lambda: crashed)
    assert type(crashed[0]) is kind
    await asyncio.wait_for(client.hand_over(), 30)
    assert (client.held, client.handled) == (0, [])
    await workers.close()
    threads.stop()


async def test_forked_child_of_a_handler_ends_when_the_handler_returns():
    """It neither replies to the parent's event loop nor takes another message."""
    children: list[int] = []

    def handle(_message: Message) -> None:
        child = os.fork()
        if child:
            children.append(child)
        else:
            os._exit(7)

    client = Client()
    workers, threads = threaded(handle, 1)
    client.give(workers, b"a")
    await eventually(lambda: client.handled == [0])
    _, status = os.waitpid(children[0], 0)
    assert os.waitstatus_to_exitcode(status) == 7
    await workers.close()
    threads.stop()


async def test_thread_ends_when_it_returns_in_a_forked_child():
    """The child has a copy of the event loop, which does not run."""
    loop = asyncio.get_running_loop()
    before = set(threading.enumerate())
    threads = HandlerThreads(lambda message: message, 1, forked=lambda: True)
    threads.start()
    (thread,) = set(threading.enumerate()) - before
    future: asyncio.Future[Any] = loop.create_future()
    threads._jobs.put((7, future, loop))
    await eventually(lambda: not thread.is_alive())
    assert not future.done()


class Patched:
    """A queue of greenlets in a real thread, as after gevent's patch_all(thread=False)."""

    def get(self) -> None:
        raise RuntimeError("This operation would block forever")

    def put(self, _job: object) -> None:
        """Drop the job: it reaches no thread."""


async def test_consumer_ends_with_advice_when_its_handlers_have_no_thread():
    """The waiting handler does not count as failed, and ends with its worker, like every
    later one.
    """
    threads, errors = HandlerThreads(lambda message: message, 2, forked=lambda: False), []
    threads.start()
    threads.on_end = errors.append
    assert await threads.run(7) == 7
    _break(threads)
    for count in (1, 2):
        waiting = asyncio.create_task(threads.run(9))
        await eventually(lambda count=count: len(errors) >= count)
        assert not waiting.done()
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
    assert {type(error) for error in errors} == {ConfigError}
    assert "would block forever" in errors[0].message
    assert "patch_all" in errors[0].message


def _break(threads: HandlerThreads) -> None:
    """Make each thread use a patched queue after its next job."""
    present, threads._jobs = threads._jobs, Patched()
    loop = asyncio.get_running_loop()
    for _ in range(2):
        present.put((0, loop.create_future(), loop))
