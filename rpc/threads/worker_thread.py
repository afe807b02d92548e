"""A thread that runs blocking functions for an event loop, one after another.

`loop.run_in_executor` makes two futures for each function, chains them, and takes five locks: more
processor time than a small write to a file. Here a function costs one entry in a queue, and one
callback for its result.
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
    """Runs functions in the order of the calls, until `close`."""

    def __init__(self, name: str) -> None:
        self.under_way = 0
        """Number of functions that wait or run, or whose end their event loop does not know yet;
        read in that loop.
        """
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def __call__(self, function: Callable[..., Any], /, *args: Any) -> asyncio.Future[Any]:
        """Return a future of `function(*args)`, or of its exception; cancelling it discards the
        result.
        """
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()
        self.under_way += 1
        self._jobs.put((loop, future, function, args))
        return future

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            loop, future, function, args = job
            value: Any = None
            error: BaseException | None = None
            try:
                value = function(*args)
            except BaseException as raised:  # noqa: BLE001 - it is passed to the caller
                error = raised
            with contextlib.suppress(RuntimeError):  # the loop has ended, and no caller waits
                loop.call_soon_threadsafe(self._finish, future, value, error)
            del job, loop, future, function, args, value, error

    def _finish(self, future: asyncio.Future[Any], value: Any, error: BaseException | None) -> None:
        self.under_way -= 1
        if future.done():
            return
        if error is None:
            future.set_result(value)
        else:
            future.set_exception(error)

    def close(self) -> None:
        """Wait until all functions have run, and end the thread."""
        self._jobs.put(None)
        self._thread.join()
