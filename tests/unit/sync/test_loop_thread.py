"""A loop thread runs work for other threads, and leaves no caller waiting when it stops."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from copy import copy

import pytest

from keylane.protocol.errors import ClosedError, InvalidRequestError, Reason
from keylane.sync import loop_logs, loop_thread
from keylane.sync.loop_thread import LoopThread
from support.raising import raises


@pytest.fixture
def thread() -> Iterator[LoopThread]:
    thread = LoopThread("client")
    thread.start()
    yield thread
    thread.stop()


async def number() -> int:
    return 7


def test_result_and_error_of_the_work_are_the_callers(thread: LoopThread):
    async def failing() -> None:
        raise LookupError("told")

    assert thread.run(number) == 7
    with pytest.raises(LookupError, match="told"):
        thread.run(failing)


def test_work_is_cancelled_when_it_takes_too_long(thread: LoopThread):
    cancelled = threading.Event()

    async def slow() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            cancelled.set()

    with pytest.raises(TimeoutError, match=r"not finished within 0\.05 s"):
        thread.run(slow, 0.05)
    assert cancelled.wait(5)
    assert thread.run(number) == 7


@pytest.mark.parametrize("timeout_s", ["a", -1, float("nan"), float("inf"), True])
def test_work_is_not_run_when_the_time_is_no_number_of_seconds(thread: LoopThread, timeout_s):
    ran = threading.Event()

    async def work() -> None:
        ran.set()

    with pytest.raises(InvalidRequestError, match="seconds >= 0"):
        thread.run(work, timeout_s)
    thread.run(number)
    assert not ran.is_set()


def test_advice_of_a_closed_client_names_calls_without_async(thread: LoopThread):
    """Also of an error that the client itself has raised, and of copies."""

    async def closed() -> None:
        raise ClosedError("the client is not open")

    with pytest.raises(ClosedError) as inside:
        thread.run(closed)
    thread.stop()
    with pytest.raises(ClosedError) as outside:
        thread.run(number)
    for error in (inside.value, outside.value, copy(outside.value)):
        assert "`with` block" in error.hint
        assert "async" not in str(error)
    assert "async with" in ClosedError().hint


def test_callers_are_refused_when_the_thread_stops(thread: LoopThread):
    """Those that wait get the error too, as many as there are."""
    started = threading.Barrier(9)
    told: list[str] = []

    async def forever() -> None:
        await asyncio.sleep(60)

    def call() -> None:
        started.wait()
        try:
            thread.run(forever)
        except ClosedError as error:
            told.append(error.message)

    callers = [threading.Thread(target=call) for _ in range(8)]
    for caller in callers:
        caller.start()
    started.wait()
    time.sleep(0.05)
    thread.stop()
    for caller in callers:
        caller.join(10)
        assert not caller.is_alive()
    assert len(told) == 8
    with pytest.raises(ClosedError, match="the client is not open") as refused:
        thread.run(number)
    assert refused.value.message == "the client is not open"
    assert "`with` block" in refused.value.hint


def test_thread_may_be_started_again_once_it_is_stopped(thread: LoopThread):
    with raises(Reason.ALREADY_OPEN):
        thread.start()
    thread.stop()
    thread.stop()
    assert thread.state == "closed"
    thread.start()
    assert (thread.run(number), thread.state) == (7, "open")


def test_call_on_the_thread_itself_is_refused(thread: LoopThread):
    async def nested() -> int:
        return thread.run(number)

    with raises(Reason.OTHER_LOOP, match=r"own event loop.*\n.*another thread"):
        thread.run(nested)


def test_start_fails_and_may_be_repeated_when_there_is_no_event_loop(monkeypatch):
    """As without a free file descriptor; no caller waits for ever."""

    def refuse() -> None:
        raise OSError("too many open files")

    thread = LoopThread("client")
    with monkeypatch.context() as patched:
        patched.setattr(asyncio, "Runner", refuse)
        for _ in range(2):
            with pytest.raises(OSError, match="too many open files"):
                thread.start()
    thread.start()
    assert thread.run(number) == 7
    thread.stop()


async def test_thread_that_is_a_greenlet_is_refused_when_another_loop_runs_in_it(
    monkeypatch: pytest.MonkeyPatch,
):
    """As gevent patches them: a thread runs in the one of its starter, where an event loop may
    run.
    """

    class Greenlet(threading.Thread):
        def start(self) -> None:
            self.run()

    monkeypatch.setattr(threading, "Thread", Greenlet)
    thread = LoopThread("client")
    with raises(Reason.OTHER_LOOP, match="threads of this program are greenlets") as caught:
        thread.start()
    assert "gevent" in str(caught.value)
    monkeypatch.undo()
    thread.start()
    assert thread.run(number) == 7
    thread.stop()


async def forever() -> None:
    await asyncio.Event().wait()


def test_client_is_closed_on_its_loop_before_the_thread_ends():
    """Whatever was interrupted: a consumer that is left open keeps its partitions until its ttl has
    passed.
    """
    told: list[str] = []

    async def end() -> None:
        told.append("end")
        await asyncio.sleep(0.01)
        told.append("closed")

    thread = LoopThread("client", close_client=end)
    thread.start()
    with pytest.raises(TimeoutError):
        thread.run(forever, 0.01)
    thread.stop()
    assert told == ["end", "closed"]


def test_thread_ends_and_the_log_says_why_when_the_client_cannot_be_closed(
    caplog: pytest.LogCaptureFixture,
):
    async def end() -> None:
        raise LookupError("told")

    thread = LoopThread("client", close_client=end)
    thread.start()
    thread.stop()
    assert "could not be closed" in caplog.text
    assert "LookupError: told" in caplog.text
    thread.start()
    assert thread.run(number) == 7
    thread.stop()


def test_start_waits_for_the_end_when_the_wait_of_stop_was_interrupted(monkeypatch):
    """As by Ctrl-C in a notebook: a client that is closing can be opened again, and is not "open
    already".
    """
    gate = threading.Event()

    async def end() -> None:
        await asyncio.to_thread(gate.wait, 10)

    def interrupt(_life: object) -> None:
        raise KeyboardInterrupt

    thread = LoopThread("client", close_client=end)
    thread.start()
    with monkeypatch.context() as patched:
        patched.setattr(loop_thread._LoopRun, "wait_until_ended", interrupt)
        with pytest.raises(KeyboardInterrupt):
            thread.stop()
    threading.Timer(0.05, gate.set).start()
    thread.start()
    assert gate.is_set()
    assert thread.run(number) == 7
    with raises(Reason.ALREADY_OPEN):
        thread.start()
    thread.stop()


@pytest.mark.parametrize("begun", [False, True])
def test_thread_can_be_started_again_when_its_start_was_interrupted(monkeypatch, begun: bool):
    """The thread that began ends: otherwise the client is "open already", and its `close` finds
    nothing to close.
    """

    wait = loop_thread._Gate.wait

    def interrupted(gate: loop_thread._Gate, timeout_s: float | None = None) -> bool:
        if begun:
            wait(gate, timeout_s)
        monkeypatch.undo()
        raise KeyboardInterrupt

    loop_logs.LOGS.start()
    thread = LoopThread("client")
    before = threading.active_count()
    monkeypatch.setattr(loop_thread._Gate, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        thread.start()
    thread.start()
    assert thread.run(number) == 7
    thread.stop()
    assert threading.active_count() == before


UNCLOSED = """
import asyncio, atexit
from keylane.sync.loop_thread import LoopThread

thread = LoopThread("client")
thread.start()

async def look_up() -> None:
    loop = asyncio.get_running_loop()
    await loop.getaddrinfo("localhost", 7000)
    # so it is from Python 3.12 on, whose interpreter starts no thread once it ends
    loop.shutdown_default_executor = refuse

async def refuse(timeout=None):
    raise RuntimeError("can't create new thread at interpreter shutdown")

thread.run(look_up)
atexit.register(thread.stop)
"""


def test_thread_ends_without_a_traceback_when_the_program_has_ended_and_its_loop_had_a_pool():
    done = subprocess.run(
        [sys.executable, "-X", "dev", "-c", UNCLOSED],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_no_thread_is_a_typed_error_and_the_thread_can_be_started_later(
    monkeypatch: pytest.MonkeyPatch,
):
    """As from Python 3.12 on, once the main thread has ended."""

    def refuse(_thread: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    thread = LoopThread("client")
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        with raises(Reason.OTHER_LOOP, match=r"needs a thread .*interpreter shutdown") as told:
            thread.start()
    assert "open the client earlier" in told.value.hint
    thread.start()
    assert thread.run(number) == 7
    thread.stop()


def test_forked_child_waits_for_nothing_of_its_parent(thread: LoopThread):
    """As of a loop over a consumer that goes on in the child: its error has to come out."""
    closing = LoopThread("client", close_client=lambda: asyncio.sleep(2))
    closing.start()
    stopper = threading.Thread(target=closing.stop)
    stopper.start()
    while closing.state == "open":
        time.sleep(0.001)
    pid = os.fork()
    if pid == 0:
        threading.Thread(target=lambda: (time.sleep(5), os._exit(1)), daemon=True).start()
        thread.post(lambda: None)
        for each in (thread, closing):
            each.stop()
        os._exit(0)
    _, status = os.waitpid(pid, 0)
    stopper.join(60)
    assert os.waitstatus_to_exitcode(status) == 0
