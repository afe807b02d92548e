"""
Threads for blocking handlers, one for each worker, so that a handler starts as soon as its worker
calls it.

Invariants
    A running handler is always awaited, even after a cancellation: a thread cannot be stopped, so
    its partition is kept until the handler returns. Threads are daemons: a hanging handler does not
    keep the program from exiting. If the last thread ends unexpectedly, the consumer closes; no
    message counts as failed because there was no thread for it. In a forked child, a thread ends
    when its handler returns, because the event loop belongs to the parent.
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
        handler: a blocking handler, called with the argument that workers pass.
        count: the number of threads to start; 0: the handler runs in the event loop.
        forked: a function that returns True in a forked child of the process that created the
            threads.
    """

    def __init__(
        self, handler: Callable[[Any], Any], count: int, *, forked: Callable[[], bool]
    ) -> None:
        self._handler = handler
        self._forked = forked
        self.is_ending_worker: Callable[[], bool] = lambda: False
        """Returns True if the running task is a worker that must end itself, not just its
        handler.
        """
        self.on_end: Callable[[ConfigError], None] = lambda _error: None
        """Called in the event loop when no thread is left to run a handler; closes the consumer."""
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._count = self._alive = count
        self._alive_lock = threading.Lock()
        self._end_error: ConfigError | None = None
        """The reason why no thread is left."""
        self._loop: asyncio.AbstractEventLoop | None = None

    def start(self) -> None:
        """
        Start the threads.

        Raises:
            ConfigError: the system cannot start all of them, so a worker would wait forever; the
                threads already started are stopped.
        """
        for number in range(self._count):
            thread = threading.Thread(
                target=self._run_thread, name=f"keylane handler {number}", daemon=True
            )
            try:
                thread.start()
            except RuntimeError as error:
                problem = (
                    f"only {number} of {self._count} handler threads could be started: {error}"
                )
                self._count = number
                self.stop()
                raise ConfigError(problem) from error

    async def run(self, argument: Any) -> Any:
        """Run the handler in a thread, and return or raise its outcome. A cancellation does not end
        the wait.
        """
        if not self._count:
            return self._handler(argument)
        loop = self._loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()
        self._jobs.put((argument, future, loop))
        if self._end_error is not None:
            self.on_end(self._end_error)
        cancelled: asyncio.CancelledError | None = None
        while not future.done():
            try:
                await asyncio.wait([future])
            except asyncio.CancelledError as error:
                cancelled = error
                if self._end_error is not None:
                    raise
        if cancelled is not None and self.is_ending_worker():
            future.exception()
            raise cancelled
        return future.result()

    def _run_thread(self) -> None:
        try:
            self._run_jobs()
        except BaseException as error:  # noqa: BLE001 - the queue failed
            self._on_thread_end(error)

    def _on_thread_end(self, error: BaseException) -> None:
        """Record that `error` ended a thread. If it was the last one, close the consumer."""
        with self._alive_lock:
            self._alive -= 1
            if self._alive:
                return
        self._end_error = ConfigError(
            f"all handler threads have ended with {type(error).__name__}: {error!s:.200}; if the "
            "program uses gevent, patch both threads and queues or neither: patch_all(), or "
            "patch_all(thread=False, queue=False)"
        )
        if self._loop is not None:  # read after _end_error is set, so that later runs see it
            with suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self.on_end, self._end_error)

    def _run_jobs(self) -> None:
        while (job := self._jobs.get()) is not None:
            argument, future, loop = job
            result, error = None, None
            try:
                result = self._handler(argument)
            except BaseException as raised:  # noqa: BLE001 - the worker decides
                error = raised
            if self._forked() or not _send_outcome(loop, future, result, error):
                return
            # An idle thread must not keep a message alive.
            del job, argument, future, loop, result, error

    def stop(self) -> None:
        """Let each thread finish its current handler and end."""
        for _ in range(self._count):
            self._jobs.put(None)


def _send_outcome(
    loop: asyncio.AbstractEventLoop,
    future: asyncio.Future[Any],
    result: Any,
    error: BaseException | None,
) -> bool:
    """Pass a handler's outcome to the event loop. Return False if the loop is closed."""
    try:
        loop.call_soon_threadsafe(_set_outcome, future, result, error)
    except RuntimeError:
        return False
    return True


def _set_outcome(future: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
    if future.done():
        return
    if isinstance(error, StopIteration):  # a future rejects it
        error = RuntimeError(f"the handler raised {error!r}")
    if error is None:
        future.set_result(result)
    else:
        future.set_exception(error)
