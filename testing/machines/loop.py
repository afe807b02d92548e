"""An event loop in virtual time that runs many simulated processes, each in order, interleaved by a
seed.

A process is a context variable: the tasks, timers and callbacks that a process creates belong to
it. Within a process callbacks run first in, first out, as asyncio promises; between processes the
random generator chooses. Time stands still while anything can run, and jumps to the next timer
when nothing can. A process's timers run at the rate of its clock; a paused process runs what was
due when it is resumed; a dead one never runs again.
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
"""Most steps in one virtual second, several times what most seeds need altogether: a loop that does
not let time pass is a fault.
"""
FAULTS_OF_CODE = (TypeError, AttributeError, NameError, ImportError, AssertionError)
"""Exceptions with which no task may end, even if nobody asks for its result."""


class StuckError(Exception):
    """No process can ever run again, or time no longer passes."""


class Process:
    """A simulated process: its ready callbacks, and the rate of its clock."""

    def __init__(
        self, name: str, rate: float = 1.0, *, context: contextvars.Context | None = None
    ) -> None:
        self.name = name
        self.rate = rate
        self.owner: Any = None
        """Host to which the program belongs, if any."""
        self.on_stop: dict[Callable[[], None], None] = {}
        """Callbacks that ask it to stop."""
        self.alive = True
        self.paused = False
        self.loop: asyncio.AbstractEventLoop | None = None
        """Event loop in which its code runs; None: that of the simulation."""
        self.threads: list[Process] = []
        """Other threads of the same program, which end with it."""
        self.ready: deque[events.Handle] = deque()
        self.queued = False
        """True while the loop has it in its list."""
        self.context = context or contextvars.Context()
        self.context.run(PROCESS.set, self)

    def kill(self) -> None:
        """Kill the process: none of its callbacks runs again."""
        for thread in self.threads:
            thread.kill()
        self.alive = False
        self.dropped_handles = list(self.ready)
        """Callbacks that never run; kept, so that none of them is destroyed before the end."""
        self.ready.clear()


CANCELLATIONS_MAX = 200
"""Cancellations of a coroutine that is ended; one that ignores all of them is closed."""


def _end_coroutine(coro: Any) -> None:
    """End a coroutine where it stands: it is cancelled there, and in each await that its clean-up
    begins.
    """
    try:
        for _ in range(CANCELLATIONS_MAX):
            if coro.cr_frame is None:
                return
            coro.throw(asyncio.CancelledError())
        coro.close()
    except BaseException:  # noqa: BLE001 - errors of a half-ended coroutine do not matter
        return


class SimLoop(asyncio.BaseEventLoop):
    """See the module."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        self.now = 0.0
        """True time in seconds."""
        self._second_began_s = 0.0
        self._steps_at_second = 0
        self.steps = 0
        self.faults: list[BaseException | str] = []
        """Uncaught exceptions."""
        self.threads: list[asyncio.AbstractEventLoop] = []
        """Event loops of the processes' other threads."""
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
        """Return the time by the clock of the running process."""
        return self.now * self._current.rate

    def call_soon(  # type: ignore[override]
        self,
        callback: Callable[..., Any],
        *args: Any,
        context: contextvars.Context | None = None,
    ) -> events.Handle:
        """See asyncio."""
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
        """See asyncio."""
        timer = events.TimerHandle(when, callback, args, self, context)
        process = timer._context.get(PROCESS, self.world)  # type: ignore[attr-defined]
        self._push_timer(when / process.rate, timer, process)
        return timer

    def _timer_handle_cancelled(self, handle: events.TimerHandle) -> None:
        pass

    def run_in_executor(  # type: ignore[override]
        self, executor: Any, func: Callable[..., Any], *args: Any
    ) -> asyncio.Future[Any]:
        """Run the function in place, because the simulation has no threads."""
        future = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:  # noqa: BLE001 - the caller awaits it
            future.set_exception(error)
        return future

    # ── the methods for the simulation ────────────────────────────────────────────────────────────
    def post(self, process: Process, callback: Callable[..., Any], *args: Any) -> None:
        """Schedule `callback` in a process, unless that is dead."""
        if process.alive:
            self._queue(process, events.Handle(callback, args, self, process.context))

    def after(self, seconds: float, callback: Callable[..., Any], *args: Any) -> None:
        """Schedule `callback` outside all processes after `seconds` of true time."""
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
        """Note that a process raised SystemExit; here only a machine that stops in the middle of a
        write does.
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
        """End all tasks at their current await, without running them further."""
        with warnings.catch_warnings():
            # Coroutines that something begins while it ends here never run.
            warnings.simplefilter("ignore", RuntimeWarning)
            running_loop = events._get_running_loop()
            events._set_running_loop(self)  # without it, a clean-up would begin its own loop
            for loop in (self, *self.threads):
                ended_tasks: set[asyncio.Task[Any]] = set()
                # A clean-up may begin further tasks.
                while remaining_tasks := asyncio.all_tasks(loop) - ended_tasks:
                    for task in remaining_tasks:
                        task._log_destroy_pending = False  # type: ignore[attr-defined]
                        _end_coroutine(task.get_coro())
                    ended_tasks |= remaining_tasks
            events._set_running_loop(running_loop)
        self._timers.clear()
        self.close()
