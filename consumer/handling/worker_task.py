"""The task of a worker: the message whose handler runs in it and for how long, requests to end this
handler, and idle workers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from ...protocol.message import Message
from ...protocol.parked import HANGS_MS
from ...protocol.text import counted
from .batch import Batch
from .failing import Failing
from .handler_log import HandlerLog, LogLine

_IGNORED = "coroutine ignored GeneratorExit"
"""Python's message for a coroutine that was closed and awaited something nevertheless."""


class WorkerTask:
    """A worker; `Workers` describes how its requests to end are counted."""

    __slots__ = (
        "cancelled_message",
        "message",
        "ran",
        "running",
        "seen",
        "seen_attempt",
        "seen_ms",
        "task",
        "timed_out",
    )

    def __init__(self) -> None:
        self.message: Message | None = None
        """The message whose handler runs."""
        self.cancelled_message: Message | None = None
        """The message whose handler was cancelled, until that request is taken back."""
        self.task: asyncio.Task[None] | None = None
        self.ran = 0
        """The number of messages handled by `_run_alone` that are not yet reported to their pull
        client.
        """
        self.running: tuple[Message, int, int] | None = None
        """The `message` at the last check for time-outs, with its attempt and the time since which
        it is there.
        """
        self.timed_out: Message | None = None
        """The message whose handler has taken too long, until the next check."""
        self.seen: Message | None = None
        """The `message` at the last check, with its attempt and the time since which it is
        there.
        """
        self.seen_attempt = 0
        self.seen_ms = 0

    def forget(self) -> None:
        """Forget the message of a worker that has ended, so that no hand-over waits for it."""
        message = self.message
        self.message = None
        if message is not None:
            message.delivery.forget(1)  # type: ignore[union-attr]

    def cancel_handler(self) -> None:
        """Request that the running handler ends."""
        assert self.task is not None
        self.cancelled_message = self.message
        self.task.cancel()

    def has_run_ms(self, now_ms: int) -> int:
        """Return the milliseconds for which the handler is known to run, at a check for
        time-outs.
        """
        message = self.message
        if message is None:
            self.running = None
            return 0
        running = self.running
        if running is None or running[0] is not message or running[1] != message.attempt:
            self.running = (message, message.attempt, now_ms)
            self.timed_out = None
            return 0
        return now_ms - running[2]

    def take_back_cancel(self) -> None:
        """Take all requests back: the handler that they were for has ended."""
        self.cancelled_message = None
        assert self.task is not None
        while self.task.uncancel():
            pass


class IdleWorkers:
    """
    The idle workers of a consumer. The one that became idle last wakes first.

    No wake-up is kept for busy workers: a worker looks for messages before it waits, without a turn
    of the event loop between.
    """

    __slots__ = ("on_idle", "waiting")

    def __init__(self) -> None:
        self.on_idle: Callable[[], None] | None = None
        """A callable that is called when a worker becomes idle."""
        self.waiting: dict[asyncio.Future[None], None] = {}
        """The futures of idle workers."""

    def __len__(self) -> int:
        return len(self.waiting)

    def wake_one(self) -> None:
        """Wake an idle worker."""
        while self.waiting:
            waiter = self.waiting.popitem()[0]
            if not waiter.done():
                waiter.set_result(None)
                return

    def wake_all(self) -> None:
        """Wake every idle worker."""
        waiting = self.waiting
        self.waiting = {}
        for waiter in waiting:
            if not waiter.done():
                waiter.set_result(None)

    async def wait(self) -> None:
        """Wait until this worker is woken."""
        waiter = asyncio.get_running_loop().create_future()
        self.waiting[waiter] = None
        if self.on_idle is not None:
            self.on_idle()
        try:
            await waiter
        except BaseException:
            if waiter in self.waiting:
                del self.waiting[waiter]
            else:
                self.wake_one()  # its wake-up goes to another worker
            raise


def closes_coroutines(error: BaseException) -> bool:
    """Return True for the error of a closed coroutine: neither it nor its callers may await
    anything any more.
    """
    ignored = isinstance(error, RuntimeError) and error.args == (_IGNORED,)
    return ignored or isinstance(error, GeneratorExit)


def current_task() -> asyncio.Task[object] | None:
    """Return the running task; None outside an event loop."""
    try:
        return asyncio.current_task()
    except RuntimeError:
        return None


def look_at(
    worker: WorkerTask, handler_log: HandlerLog, failing: Failing, now_ms: int
) -> LogLine | None:
    """Return the line that is due about a worker's handler; a handler that does not return is also
    reported to its broker.
    """
    message, seen = worker.message, worker.seen
    if message is not None and message is seen and message.attempt == worker.seen_attempt:
        running_ms = now_ms - worker.seen_ms
        if running_ms >= HANGS_MS:
            why = failing.hanging(_what(message), message.attempt)
            message.delivery.note_hangs(message, why, running_ms)  # type: ignore[union-attr]
        return handler_log.running(message, worker.seen_ms, now_ms)
    worker.seen = message
    worker.seen_ms = now_ms
    worker.seen_attempt = 0 if message is None else message.attempt
    return None if seen is None else handler_log.stopped(seen, now_ms)


def _what(message: Message) -> str:
    batch: Any = message
    if not isinstance(batch, Batch):
        return "its handler has not returned"
    return f"the handler of its batch of {counted(len(batch), 'message')} has not returned"
