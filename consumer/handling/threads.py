"""Threads for handlers that block: one for each worker, so that a handler starts as soon as its
worker calls it.

Invariants
    A running handler is awaited, whatever is cancelled: a thread cannot be stopped, so its
    partition stays until it ends. Threads are daemons: a handler that hangs does not keep a program
    from ending. When the last thread has ended unexpectedly, the consumer ends: no message counts
    as failed because there is no thread. A thread that returns in a forked child ends: the event
    loop belongs to the parent.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue
from typing import Any

from ...protocol.errors import ConfigError

_Job = tuple[Any, asyncio.Future[Any], asyncio.AbstractEventLoop]


class HandlerThreads:
    """
    Runs a handler in `count` threads.

    Args:
        handler: the handler, which blocks; it gets the argument that workers pass.
        count: the number of threads, which `start` starts; 0: the handler runs in the event loop.
        forked: True in a child of the process that made the threads.
    """

    def __init__(
        self, handler: Callable[[Any], Any], count: int, *, forked: Callable[[], bool]
    ) -> None:
        self._handler = handler
        self._forked = forked
        self.ends: Callable[[], bool] = lambda: False
        """A callable that is True if the running task, a worker, must itself end, not only its
        handler.
        """
        self.on_end: Callable[[ConfigError], None] = lambda _error: None
        """A callable for the event loop that ends the consumer when a handler has no thread any
        more.
        """
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._count = self._alive = count
        self._alive_lock = threading.Lock()
        self._ended: ConfigError | None = None
        """The reason why no thread is left."""
        self._loop: asyncio.AbstractEventLoop | None = None

    def start(self) -> None:
        """
        Start the threads.

        Raises:
            ConfigError: the system provides too few, so that a worker would wait for ever; no
                thread is left.
        """
        for number in range(self._count):
            thread = threading.Thread(
                target=self._serve, name=f"keylane handler {number}", daemon=True
            )
            try:
                thread.start()
            except RuntimeError as error:
                told = f"the system gives {number} of {self._count} threads for handlers: {error}"
                self._count = number
                self.stop()
                raise ConfigError(told) from error

    async def run(self, given: Any) -> Any:
        """Run the handler in a thread, and return or raise its outcome, even if this call was
        cancelled meanwhile.
        """
        if not self._count:
            return self._handler(given)
        loop = self._loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()
        self._jobs.put((given, future, loop))
        if self._ended is not None:
            self.on_end(self._ended)
        cancelled: asyncio.CancelledError | None = None
        while not future.done():
            try:
                await asyncio.wait([future])
            except asyncio.CancelledError as error:
                cancelled = error
                if self._ended is not None:
                    raise
        if cancelled is not None and self.ends():
            future.exception()
            raise cancelled
        return future.result()

    def _serve(self) -> None:
        try:
            self._take_jobs()
        except BaseException as error:  # noqa: BLE001 - of the queue: a handler's are its own
            self._end(error)

    def _end(self, error: BaseException) -> None:
        """Note that a thread ends because of this error; with the last thread, the consumer
        ends.
        """
        with self._alive_lock:
            self._alive -= 1
            if self._alive:
                return
        self._ended = ConfigError(
            f"the handler threads have ended, of {type(error).__name__}: {error!s:.200}; where "
            f"gevent patches the program, "
            "patch threads and queues alike: patch_all(), or patch_all(thread=False, queue=False)"
        )
        if self._loop is not None:  # read after that line: a later wait sees the error
            with suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self.on_end, self._ended)

    def _take_jobs(self) -> None:
        while (job := self._jobs.get()) is not None:
            given, future, loop = job
            result, error = None, None
            try:
                result = self._handler(given)
            except BaseException as raised:  # noqa: BLE001 - the worker decides
                error = raised
            if self._forked() or not _tell(loop, future, result, error):
                return
            # A thread that waits keeps nothing of a message.
            del job, given, future, loop, result, error

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
    """Give the outcome to the event loop, and return False if it is closed."""
    try:
        loop.call_soon_threadsafe(_settle, future, result, error)
    except RuntimeError:
        return False
    return True


def _settle(future: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
    if future.done():
        return
    if isinstance(error, StopIteration):  # a future accepts none
        error = RuntimeError(f"the handler raised {error!r}")
    if error is None:
        future.set_result(result)
    else:
        future.set_exception(error)
