"""Threads of simulated processes: each has an event loop of its own, in which asyncio works as it
does between real loops.

A future of one loop cannot be awaited in another, a task runs where it was made, and
`asyncio.get_running_loop` is the loop of the thread that runs. Threads take turns between
callbacks, not between instructions.
"""

from __future__ import annotations

import asyncio
import contextvars
from asyncio import events
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from keylane.producer import sending
from keylane.rpc import loop_binding
from keylane.testing.machines.loop import Process, SimLoop

FIRST_THREAD = 1
"""What the operating system calls the thread in which a simulated process begins."""


class ThreadLoop(asyncio.AbstractEventLoop):
    """The event loop of one more thread of a process; it takes its turns from the loop of the
    simulation.
    """

    def __init__(self, loop: SimLoop, number: int) -> None:
        self._loop = loop
        self.number = number

    def get_debug(self) -> bool:
        return False

    def is_closed(self) -> bool:
        return self._loop.is_closed()

    def is_running(self) -> bool:
        return True

    def time(self) -> float:
        return self._loop.time()

    def call_soon(
        self,
        callback: Callable[..., Any],
        *args: Any,
        context: contextvars.Context | None = None,
    ) -> events.Handle:
        return self._loop.call_soon(callback, *args, context=context)

    call_soon_threadsafe = call_soon  # type: ignore[assignment]

    def call_at(
        self,
        when: float,
        callback: Callable[..., Any],
        *args: Any,
        context: contextvars.Context | None = None,
    ) -> events.TimerHandle:
        return self._loop.call_at(when, callback, *args, context=context)

    def call_later(
        self,
        delay: float,
        callback: Callable[..., Any],
        *args: Any,
        context: contextvars.Context | None = None,
    ) -> events.TimerHandle:
        return self.call_at(self.time() + delay, callback, *args, context=context)

    def _timer_handle_cancelled(self, handle: events.TimerHandle) -> None:
        pass

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self)

    def create_task(
        self,
        coro: Any,
        *,
        name: str | None = None,
        context: contextvars.Context | None = None,
    ) -> asyncio.Task[Any]:
        return asyncio.Task(coro, loop=self, name=name, context=context)

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        self._loop.call_exception_handler(context)


def new_thread(process: Process, loop: SimLoop, number: int) -> Process:
    """One more thread of a process: it is scheduled by itself, and ends when the caller kills
    it.
    """
    thread = Process(process.name, process.rate)
    thread.owner = process.owner
    thread.loop = ThreadLoop(loop, number)
    loop.threads.append(thread.loop)
    return thread


def thread_number() -> int:
    """What the operating system calls the thread that runs now."""
    return getattr(asyncio.get_running_loop(), "number", FIRST_THREAD)


def held_by_number() -> Callable[[], bool]:
    """As `make_thread_check` of `rpc/loop_binding.py`, of simulated threads."""
    number = thread_number()
    return lambda: thread_number() == number


@contextmanager
def simulated_threads() -> Iterator[None]:
    """Producers and consumers know threads by these numbers."""
    simulated: list[tuple[Any, str, Any]] = [
        (loop_binding, "get_ident", thread_number),
        (sending, "make_thread_check", held_by_number),
    ]
    real = [getattr(room, name) for room, name, _ in simulated]
    if real[1] is not loop_binding.make_thread_check:  # a mutant's
        del simulated[1]
    for room, name, its in simulated:
        setattr(room, name, its)
    try:
        yield
    finally:
        for (room, name, _), its in zip(simulated, real, strict=False):
            setattr(room, name, its)
