"""A thread that runs blocking functions for an event loop, one after another.

For each function, `loop.run_in_executor` creates two futures, chains them, and takes five locks,
which costs more CPU time than a small write to a file. Here, a function costs one queue entry, and
one callback for its result.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

_Job = tuple[asyncio.AbstractEventLoop, asyncio.Future[Any], Callable[..., Any], tuple[Any, ...]]


class WorkerThread:
    """Runs functions in the order in which they are submitted, until it is closed."""

    def __init__(self, name: str) -> None:
        self.in_flight = 0
        """The number of submitted functions whose results the event loop has not received yet. Only
        read this in that loop.
        """
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def __call__(self, function: Callable[..., Any], /, *args: Any) -> asyncio.Future[Any]:
        """Submit `function(*args)`, and return a future for its result or exception. Cancelling the
        future discards the result.
        """
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()
        self.in_flight += 1
        self._jobs.put((loop, future, function, args))
        return future

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            loop, future, function, args = job
            value: Any = None
            error: BaseException | None = None
            try:
                value = function(*args)
            except BaseException as raised:  # noqa: BLE001 - the future raises it
                error = raised
            with contextlib.suppress(RuntimeError):  # the loop is closed, so no caller waits
                loop.call_soon_threadsafe(self._finish, future, value, error)
            del job, loop, future, function, args, value, error

    def _finish(self, future: asyncio.Future[Any], value: Any, error: BaseException | None) -> None:
        self.in_flight -= 1
        if future.done():
            return
        if error is None:
            future.set_result(value)
        else:
            future.set_exception(error)

    def close(self) -> None:
        """Wait until all submitted functions have run, then end the thread."""
        self._jobs.put(None)
        self._thread.join()
