"""A worker thread runs functions in order, and returns their results or errors."""

from __future__ import annotations

import asyncio
import threading

import pytest

from keylane.rpc.threads.worker_thread import WorkerThread


@pytest.fixture
def worker():
    worker = WorkerThread("test worker")
    yield worker
    worker.close()


async def test_functions_run_in_order_on_one_other_thread(worker):
    ran = []

    def note(number):
        ran.append((number, threading.current_thread().name))
        return number * number

    values = await asyncio.gather(*(worker(note, number) for number in range(100)))
    assert values == [number * number for number in range(100)]
    assert ran == [(number, "test worker") for number in range(100)]


async def test_error_of_a_function_is_raised_by_its_future_alone(worker):
    def fail():
        raise LookupError("not here")

    failing, following = worker(fail), worker(len, "abc")
    with pytest.raises(LookupError, match="not here"):
        await failing
    assert await following == 3


async def test_cancelled_caller_leaves_the_thread_at_work(worker):
    entered, let_go = threading.Event(), threading.Event()

    def wait():
        entered.set()
        assert let_go.wait(10)

    waiting = worker(wait)
    while not entered.is_set():
        await asyncio.sleep(0.001)
    waiting.cancel()
    following = worker(len, "abc")
    let_go.set()
    assert await following == 3
    assert waiting.cancelled()


def test_close_waits_until_every_function_has_run():
    """Even functions whose event loop has ended meanwhile."""
    worker, ran = WorkerThread("test worker"), []
    let_go = threading.Event()

    async def begin() -> None:
        worker(let_go.wait, 10)
        for number in range(10):
            worker(ran.append, number)

    asyncio.run(begin())
    assert not ran
    let_go.set()
    worker.close()
    assert ran == list(range(10))
