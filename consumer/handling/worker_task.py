"""The task of a worker: the message whose handler runs in it, for how long, requests that this
handler ends, and idle ones.
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
    """A worker; `Workers` says how its requests to end are counted."""

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
        """Messages handled by `_run_alone` that their pull client was not told of."""
        self.running: tuple[Message, int, int] | None = None
        """`message` at the last look for time-outs; with its attempt, and since when it is
        there.
        """
        self.timed_out: Message | None = None
        """The message whose handler has taken too long, until the next one's look."""
        self.seen: Message | None = None
        """`message` at the last check; with its attempt, and since when it is there."""
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
        """For how many milliseconds the handler is known to run, at a look for time-outs."""
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
    The idle workers of a consumer.  The one that became idle last wakes first.

    Nothing is remembered for workers that are busy: a worker looks for messages before it waits,
    without a turn of the event loop between.
    """

    __slots__ = ("on_idle", "waiting")

    def __init__(self) -> None:
        self.on_idle: Callable[[], None] | None = None
        """Called when a worker becomes idle."""
        self.waiting: dict[asyncio.Future[None], None] = {}
        """A future of each."""

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
                self.wake_one()  # what it was woken for is another's now
            raise


def closes_coroutines(error: BaseException) -> bool:
    """True for the error of a closed coroutine: neither it nor its callers may await anything any
    more.
    """
    ignored = isinstance(error, RuntimeError) and error.args == (_IGNORED,)
    return ignored or isinstance(error, GeneratorExit)


def current_task() -> asyncio.Task[object] | None:
    """The task that runs; None if no event loop does."""
    try:
        return asyncio.current_task()
    except RuntimeError:
        return None


def look_at(
    worker: WorkerTask, handler_log: HandlerLog, failing: Failing, now_ms: int
) -> LogLine | None:
    """The line that is due about a worker's handler, whose broker is told too if it does not
    return.
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
