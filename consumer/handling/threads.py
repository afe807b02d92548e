"""Threads for handlers that block: one for each worker, so that a handler starts as soon as its worker calls it.

Invariants
    A handler that runs is waited for, whatever is cancelled: a thread cannot be stopped, so its partition stays until it ends.
    Threads are daemons: a handler that hangs does not keep a program from ending.
    A thread that returns in a forked child ends: the event loop is the parent's.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

_Job = tuple[Any, asyncio.Future[Any], asyncio.AbstractEventLoop]


class HandlerThreads:
    """
    Runs a handler in `count` threads.

    Args:
        handler: blocks; it is given what workers give it.
        count: 0: it runs in the event loop.
        forked: True in a child of the process that made the threads.
    """

    def __init__(
        self, handler: Callable[[Any], Any], count: int, *, forked: Callable[[], bool]
    ) -> None:
        self._handler = handler
        self._forked = forked
        self.ends: Callable[[], bool] = lambda: False
        """True if the running task, a worker, is to end itself, not only its handler."""
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._count = count
        for number in range(count):
            name = f"keylane handler {number}"
            threading.Thread(target=self._serve, name=name, daemon=True).start()

    async def run(self, given: Any) -> Any:
        """Run the handler in a thread; returns or raises what it does, also if it was cancelled meanwhile."""
        if not self._count:
            return self._handler(given)
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()
        self._jobs.put((given, future, loop))
        cancelled: asyncio.CancelledError | None = None
        while not future.done():
            try:
                await asyncio.wait([future])
            except asyncio.CancelledError as error:
                cancelled = error
        if cancelled is not None and self.ends():
            future.exception()
            raise cancelled
        return future.result()

    def _serve(self) -> None:
        while (job := self._jobs.get()) is not None:
            given, future, loop = job
            result, error = None, None
            try:
                result = self._handler(given)
            except BaseException as raised:  # noqa: BLE001 - the worker decides
                error = raised
            if self._forked() or not _tell(loop, future, result, error):
                return
            del (
                job,
                given,
                future,
                loop,
                result,
                error,
            )  # nothing of a message stays while the thread waits

    def stop(self) -> None:
        """Let the threads end, each after the handler that it runs."""
        for _ in range(self._count):
            self._jobs.put(None)


def _tell(
    loop: asyncio.AbstractEventLoop,
    future: asyncio.Future[Any],
    result: Any,
    error: BaseException | None,
) -> bool:
    """Give the outcome to the event loop; False if it is closed."""
    try:
        loop.call_soon_threadsafe(_settle, future, result, error)
    except RuntimeError:
        return False
    return True


def _settle(future: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
    if future.done():
        return
    if isinstance(error, StopIteration):  # a future takes none
        error = RuntimeError(f"the handler raised {error!r}")
    if error is None:
        future.set_result(result)
    else:
        future.set_exception(error)
