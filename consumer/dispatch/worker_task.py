"""A worker's task: which message its handler is running on and for how long, requests to cancel the
handler, and the set of idle workers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from ...protocol.message import Message
from ...protocol.parked import HANGS_MS
from ...protocol.text import counted
from ..handed_out import shell_of
from ..session.events import MessageHangs
from .failing import FailureRecords
from .handler_log import HandlerLog, LogLine

_IGNORED_EXIT = "coroutine ignored GeneratorExit"
"""Python's error message for a coroutine that awaits something after it was closed."""


class WorkerTask:
    """The state of one worker. `Workers` documents how cancel requests are counted."""

    __slots__ = (
        "cancelled_message",
        "message",
        "messages",
        "timeout_check",
        "checked_message",
        "checked_attempt",
        "checked_since_ms",
        "task",
        "timed_out_message",
    )

    def __init__(self) -> None:
        self.message: Message | None = None
        """The message whose handler is running; of a batch, the first one."""
        self.messages: list[Message] | None = None
        """The batch whose handler is running; None if it is a handler of one message."""
        self.cancelled_message: Message | None = None
        """The message whose handler was asked to cancel, until the request is withdrawn."""
        self.task: asyncio.Task[None] | None = None
        self.timeout_check: tuple[Message, int, int] | None = None
        """The message at the last timeout check, its attempt, and the time when it was first
        seen.
        """
        self.timed_out_message: Message | None = None
        """The message whose handler has exceeded its timeout."""
        self.checked_message: Message | None = None
        """The message at the last check for hanging handlers. The next two attributes are its
        attempt and the time when it was first seen.
        """
        self.checked_attempt = 0
        self.checked_since_ms = 0

    def forget_checks(self) -> None:
        """Drop the checked messages: they refer to the consumer, and the garbage collector does not
        track messages.
        """
        self.checked_message = self.timed_out_message = self.timeout_check = None

    def cancel_handler(self) -> None:
        """Request the cancellation of the running handler."""
        assert self.task is not None
        self.cancelled_message = self.message
        self.task.cancel()

    def measure_running_ms(self, now_ms: int) -> int:
        """Return how long the handler is known to have been running, in milliseconds. Called by
        each timeout check.
        """
        message = self.message
        if message is None:
            self.timeout_check = None
            return 0
        check = self.timeout_check
        if check is None or check[0] is not message or check[1] != message.attempt:
            self.timeout_check = (message, message.attempt, now_ms)
            self.timed_out_message = None
            return 0
        return now_ms - check[2]

    def uncancel(self) -> None:
        """Withdraw all cancel requests: the handler they were meant for has ended."""
        self.cancelled_message = None
        assert self.task is not None
        while self.task.uncancel():
            pass


class IdleWorkers:
    """
    The idle workers of a consumer, woken in LIFO order.

    Wake-ups of busy workers are not stored: a worker looks for messages immediately before it
    waits, without yielding to the event loop in between.
    """

    __slots__ = ("on_idle", "waiting")

    def __init__(self) -> None:
        self.on_idle: Callable[[], None] | None = None
        """Called when a worker becomes idle."""
        self.waiting: dict[asyncio.Future[None], None] = {}
        """The futures of the idle workers."""

    def __len__(self) -> int:
        return len(self.waiting)

    def wake_one(self) -> None:
        """Wake an idle worker."""
        while self.waiting:
            waiter = self.waiting.popitem()[0]
            if not waiter.done():
                waiter.set_result(None)
                return

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
                self.wake_one()  # pass the wake-up on to another worker
            raise


def is_coroutine_closed(error: BaseException) -> bool:
    """Return True for the error of a closed coroutine, after which neither it nor its callers may
    await anything.
    """
    ignored = isinstance(error, RuntimeError) and error.args == (_IGNORED_EXIT,)
    return ignored or isinstance(error, GeneratorExit)


def current_task() -> asyncio.Task[object] | None:
    """Return the running task, or None outside an event loop."""
    try:
        return asyncio.current_task()
    except RuntimeError:
        return None


def check_worker(
    worker: WorkerTask, handler_log: HandlerLog, records: FailureRecords, now_ms: int
) -> LogLine | None:
    """Return the log line that is due for a worker's handler, and report a hanging handler to the
    broker.
    """
    message, checked_message = worker.message, worker.checked_message
    if (
        message is not None
        and message is checked_message
        and message.attempt == worker.checked_attempt
    ):
        running_ms = now_ms - worker.checked_since_ms
        if running_ms >= HANGS_MS:
            failure = records.build_hang_failure(_describe_hang(worker), message.attempt)
            shell_of(message).feed(MessageHangs(message, failure, running_ms))
        return handler_log.record_running(message, worker.checked_since_ms, now_ms)
    worker.checked_message = message
    worker.checked_since_ms = now_ms
    worker.checked_attempt = 0 if message is None else message.attempt
    return None if checked_message is None else handler_log.record_stopped(checked_message, now_ms)


def _describe_hang(worker: WorkerTask) -> str:
    if worker.messages is None:
        return "its handler has not returned"
    return (
        f"the handler of its batch of {counted(len(worker.messages), 'message')} has not returned"
    )
