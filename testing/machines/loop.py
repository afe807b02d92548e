"""An event loop in virtual time that runs many simulated processes. Each runs in order; the seed
determines how they are interleaved.

The current process is stored in a context variable, so the tasks, timers and callbacks that a
process creates belong to it. Within a process, callbacks run first in, first out, as asyncio
promises. Between processes, the random number generator chooses. Time stands still while anything
can run, and jumps to the next timer when nothing can. The timers of a process run at the rate of
its clock. A paused process runs what is due when it is resumed; a dead one never runs again.
"""

from __future__ import annotations

import asyncio
import contextvars
import heapq
import random
import warnings
from asyncio import events
from collections import deque
from collections.abc import Callable
from typing import Any

PROCESS: contextvars.ContextVar[Process] = contextvars.ContextVar("process")
STEPS_MAX = 200_000
"""The maximum number of steps in one virtual second, several times what most seeds need in total. A
loop that does not let time advance is a fault.
"""
FAULTS_OF_CODE = (TypeError, AttributeError, NameError, ImportError, AssertionError)
"""Exceptions with which no task may end, even if nobody retrieves its result."""


class StuckError(Exception):
    """No process can ever run again, or time no longer advances."""


class Process:
    """A simulated process: its ready callbacks, and the rate of its clock."""

    def __init__(
        self, name: str, rate: float = 1.0, *, context: contextvars.Context | None = None
    ) -> None:
        self.name = name
        self.rate = rate
        self.owner: Any = None
        """The host that the program belongs to, if any."""
        self.on_stop: dict[Callable[[], None], None] = {}
        """Callbacks that ask the process to stop."""
        self.alive = True
        self.paused = False
        self.loop: asyncio.AbstractEventLoop | None = None
        """The event loop in which the code of the process runs; None for that of the simulation."""
        self.threads: list[Process] = []
        """Other threads of the same program, which end with it."""
        self.ready: deque[events.Handle] = deque()
        self.queued = False
        """True while the process is in the loop's queue."""
        self.context = context or contextvars.Context()
        self.context.run(PROCESS.set, self)

    def kill(self) -> None:
        """Kill the process. None of its callbacks runs again."""
        for thread in self.threads:
            thread.kill()
        self.alive = False
        self.dropped_handles = list(self.ready)
        """Callbacks that will never run. They are kept so that none of them is destroyed before the
        end.
        """
        self.ready.clear()


CANCELLATIONS_MAX = 200
"""The maximum number of times that a coroutine is cancelled to end it; one that ignores all
cancellations is closed.
"""


def _end_coroutine(coro: Any) -> None:
    """End a coroutine where it currently waits, by cancelling it there and in each await of its
    cleanup.
    """
    try:
        for _ in range(CANCELLATIONS_MAX):
            if coro.cr_frame is None:
                return
            coro.throw(asyncio.CancelledError())
        coro.close()
    except BaseException:  # noqa: BLE001 - errors in a half-ended coroutine do not matter
        return


class SimLoop(asyncio.BaseEventLoop):
    """The event loop; see the module docstring."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        self.now = 0.0
        """The true time in seconds."""
        self._second_began_s = 0.0
        self._steps_at_second = 0
        self.steps = 0
        self.faults: list[BaseException | str] = []
        """Uncaught exceptions."""
        self.threads: list[asyncio.AbstractEventLoop] = []
        """The event loops of the processes' other threads."""
        self.world = Process("world")
        self.world.context.run(PROCESS.set, self.world)
        self._rng = rng
        self._current = self.world
        self._runnable: list[Process] = []
        self._timers: list[tuple[float, int, events.Handle, Process]] = []
        self._number = 0
        self._clock_resolution = 1e-9
        self.set_exception_handler(self._on_exception)

    def _on_exception(self, _loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        message = context.get("message", "")
        error = context.get("exception")
        is_unretrieved = "never retrieved" in message or "was destroyed" in message
        if not is_unretrieved or isinstance(error, FAULTS_OF_CODE):
            self.faults.append(error or message)

    # ── the methods of an asyncio loop ────────────────────────────────────────────────────────────
    def time(self) -> float:
        """Return the time according to the clock of the running process."""
        return self.now * self._current.rate

    def call_soon(  # type: ignore[override]
        self,
        callback: Callable[..., Any],
        *args: Any,
        context: contextvars.Context | None = None,
    ) -> events.Handle:
        """See `asyncio.loop.call_soon`."""
        handle = events.Handle(callback, args, self, context)
        self._queue(handle._context.get(PROCESS, self.world), handle)  # type: ignore[attr-defined]
        return handle

    call_soon_threadsafe = call_soon  # type: ignore[assignment]

    def call_at(  # type: ignore[override]
        self,
        when: float,
        callback: Callable[..., Any],
        *args: Any,
        context: contextvars.Context | None = None,
    ) -> events.TimerHandle:
        """See `asyncio.loop.call_at`."""
        timer = events.TimerHandle(when, callback, args, self, context)
        process = timer._context.get(PROCESS, self.world)  # type: ignore[attr-defined]
        self._push_timer(when / process.rate, timer, process)
        return timer

    def _timer_handle_cancelled(self, handle: events.TimerHandle) -> None:
        pass

    def run_in_executor(  # type: ignore[override]
        self, executor: Any, func: Callable[..., Any], *args: Any
    ) -> asyncio.Future[Any]:
        """Run the function immediately, because the simulation has no threads."""
        future = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:  # noqa: BLE001 - the caller awaits it
            future.set_exception(error)
        return future

    # ── the methods for the simulation ────────────────────────────────────────────────────────────
    def post(self, process: Process, callback: Callable[..., Any], *args: Any) -> None:
        """Schedule `callback` in a process, unless the process is dead."""
        if process.alive:
            self._queue(process, events.Handle(callback, args, self, process.context))

    def after(self, seconds: float, callback: Callable[..., Any], *args: Any) -> None:
        """Schedule `callback` outside all processes, after `seconds` of true time."""
        handle = events.Handle(callback, args, self, self.world.context)
        self._push_timer(self.now + seconds, handle, self.world)

    def resume(self, process: Process) -> None:
        """Resume a paused process."""
        process.paused = False
        if process.ready and not process.queued and process.alive:
            process.queued = True
            self._runnable.append(process)

    # ── running ───────────────────────────────────────────────────────────────────────────────────
    def _queue(self, process: Process, handle: events.Handle) -> None:
        if not process.alive:
            return
        process.ready.append(handle)
        if not process.queued and not process.paused:
            process.queued = True
            self._runnable.append(process)

    def _push_timer(self, when: float, handle: events.Handle, process: Process) -> None:
        self._number += 1
        heapq.heappush(self._timers, (when, self._number, handle, process))

    def _run_once(self) -> None:
        runnable = self._runnable
        if not runnable:
            self._advance_time()
            if not runnable:
                return
        index = int(self._rng.random() * len(runnable)) if len(runnable) > 1 else 0
        process = runnable[index]
        runnable[index] = runnable[-1]
        runnable.pop()
        process.queued = False
        if process.paused or not process.alive:
            return
        self._current = process
        if process.loop is not None:
            events._set_running_loop(process.loop)
        ready = process.ready
        for _ in range(len(ready)):
            if not ready or process.paused:
                break
            handle = ready.popleft()
            if not handle._cancelled:
                self.steps += 1
                try:
                    handle._run()
                except SystemExit as error:  # a process ended in the middle of its work
                    self.on_exit(process, error)
                    break
        self._current = self.world
        if process.loop is not None:
            events._set_running_loop(self)
        if ready and not process.paused and not process.queued:
            process.queued = True
            runnable.append(process)
        if self.steps - self._steps_at_second > STEPS_MAX:
            raise StuckError("time no longer passes")

    def on_exit(self, process: Process, _error: SystemExit) -> None:
        """Handle a SystemExit raised in a process. In a simulation, this only happens if a machine
        stops in the middle of a write.
        """
        assert not process.alive

    def _advance_time(self) -> None:
        timers = self._timers
        while timers and timers[0][2]._cancelled:
            heapq.heappop(timers)
        if not timers:
            raise StuckError("nothing can ever run again")
        when, _, handle, process = heapq.heappop(timers)
        self.now = max(self.now, when)
        if self.now >= self._second_began_s + 1:
            self._second_began_s = self.now
            self._steps_at_second = self.steps
        if not handle._cancelled:
            self._queue(process, handle)

    def dispose(self) -> None:
        """End all tasks at their current await without running them further."""
        with warnings.catch_warnings():
            # Coroutines that are started while a task ends here never run.
            warnings.simplefilter("ignore", RuntimeWarning)
            running_loop = events._get_running_loop()
            events._set_running_loop(self)  # without it, a cleanup would start its own loop
            for loop in (self, *self.threads):
                ended_tasks: set[asyncio.Task[Any]] = set()
                # A cleanup may start more tasks.
                while remaining_tasks := asyncio.all_tasks(loop) - ended_tasks:
                    for task in remaining_tasks:
                        task._log_destroy_pending = False  # type: ignore[attr-defined]
                        _end_coroutine(task.get_coro())
                    ended_tasks |= remaining_tasks
            events._set_running_loop(running_loop)
        self._timers.clear()
        self.close()
