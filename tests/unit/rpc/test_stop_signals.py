"""SIGTERM and SIGINT as an event, beside users' handlers, which are restored afterwards."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator

import pytest
import uvloop

from keylane.rpc.stop_signals import StopSignals

BOTH = pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
LOOPS = pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])


@contextlib.contextmanager
def handled_by(number: int, handler: Callable[..., object] | int) -> Iterator[None]:
    before = signal.signal(number, handler)
    try:
        yield
    finally:
        signal.signal(number, before)


async def told(signals: StopSignals) -> None:
    async with asyncio.timeout(5):
        await signals.event.wait()


@BOTH
@LOOPS
def test_signal_sets_the_event_and_the_handler_before_stands_again(number, new_loop):
    """On both event loops, and for a loop that waits for nothing else."""

    async def main() -> None:
        before = signal.getsignal(number)
        with StopSignals() as signals:
            asyncio.get_running_loop().call_later(0.05, signal.raise_signal, number)
            await told(signals)
        assert signal.getsignal(number) is before

    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(main())


@BOTH
@LOOPS
def test_handlers_of_the_users_loop_are_called_too(number, new_loop):
    """A handler given to the loop before is called once, and is still there afterwards."""
    calls: list[str] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(number, calls.append, "user")
        with StopSignals() as signals:
            signal.raise_signal(number)
            await told(signals)
            await asyncio.sleep(0.05)
            assert calls == ["user"]
        signal.raise_signal(number)
        await asyncio.sleep(0.05)
        assert calls == ["user", "user"]
        loop.remove_signal_handler(number)

    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(main())


@BOTH
async def test_python_handler_is_called_for_each_signal(number):
    """A handler of the user's gets the first signal and, alone, the second."""
    calls: list[int] = []
    with handled_by(number, lambda got, _frame: calls.append(got)), StopSignals() as signals:
        signal.raise_signal(number)
        await told(signals)
        assert calls == [number]
        signal.raise_signal(number)
        assert calls == [number, number]


@BOTH
async def test_first_signal_does_not_interrupt_when_the_handler_raises(number):
    """PySpark's handler of SIGINT cancels its jobs and raises KeyboardInterrupt; the second signal
    does interrupt.
    """
    calls: list[int] = []

    def cancel_and_raise(got: int, _frame: object) -> None:
        calls.append(got)
        raise KeyboardInterrupt

    with handled_by(number, cancel_and_raise), StopSignals() as signals:
        signal.raise_signal(number)
        await told(signals)
        assert calls == [number]
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(number)
        assert calls == [number, number]


async def test_ignored_signal_stays_ignored():
    """A process that was started to ignore it (nohup) is not ended by it."""
    with handled_by(signal.SIGTERM, signal.SIG_IGN), StopSignals() as signals:
        signal.raise_signal(signal.SIGTERM)
        await asyncio.sleep(0.05)
        assert not signals.event.is_set()


async def test_every_open_one_is_told_and_the_last_puts_the_handler_back():
    """Two consumers of a process end together, whichever is through first."""
    before = signal.getsignal(signal.SIGTERM)
    with StopSignals() as second:
        with StopSignals() as first:
            signal.raise_signal(signal.SIGTERM)
            await told(first)
        assert signal.getsignal(signal.SIGTERM) is not before
        await told(second)
        with StopSignals() as late:
            await told(late)
    assert signal.getsignal(signal.SIGTERM) is before


async def test_handler_installed_meanwhile_stays():
    """A handler that the user installs meanwhile is not removed at the end."""
    before = signal.getsignal(signal.SIGTERM)

    def own(_number, _frame):
        pass

    try:
        with StopSignals():
            signal.signal(signal.SIGTERM, own)
        assert signal.getsignal(signal.SIGTERM) is own
    finally:
        signal.signal(signal.SIGTERM, before)


def test_in_a_thread_nothing_is_installed():
    """Python lets only the main thread handle signals."""
    handlers: list[object] = []

    async def main() -> None:
        with StopSignals():
            handlers.append(signal.getsignal(signal.SIGTERM))

    before = signal.getsignal(signal.SIGTERM)
    thread = threading.Thread(target=lambda: asyncio.run(main()))
    thread.start()
    thread.join(10)
    assert handlers == [before]


STUCK = """
import asyncio, signal
from keylane.rpc.stop_signals import StopSignals

async def main():
    with StopSignals() as one:
        print("ready", flush=True)
        await one.event.wait()
        print("told", flush=True)
        for _ in range(20):
            try:
                await asyncio.sleep(3)
            except asyncio.CancelledError:
                pass

asyncio.run(main())
"""


@BOTH
def test_second_signal_ends_the_process(number):
    """At once, even if a task ignores that `asyncio.run` cancels it."""
    process = subprocess.Popen(
        [sys.executable, "-c", STUCK], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout.readline() == "ready\n"
        process.send_signal(number)
        assert process.stdout.readline() == "told\n"
        process.send_signal(number)
        _, complaint = process.communicate(timeout=20)
        assert process.returncode == -number
        assert complaint == ""
    finally:
        process.kill()
        process.wait()
