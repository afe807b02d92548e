"""Handles log records of keylane.sync's event loops on a separate thread.

    event loop ── record ──▶ queue ──▶ thread "keylane logs" ──▶ handlers of the program

A thread holds a log handler's lock while it calls the handler. A handler that sends records with a
producer of keylane.sync waits for an event loop. If that loop logged too, and waited for the lock,
both would deadlock.

Invariants
    An event loop never waits for a handler: records beyond RECORDS_MAX are dropped, and their
    number is logged. A record whose handler needs a client that is closed is dropped. Records keep
    their order. Stopping a loop thread waits for at most SETTLE_S until its records are handled.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from threading import get_ident
from typing import Any

from ..protocol.errors import ClosedError
from ..rpc.loop_binding import at_fork

RECORDS_MAX = 10_000
"""The maximum number of records that may wait for the handlers."""
SETTLE_S = 0.2
"""The longest time, in seconds, that a closing client waits for the handlers. It must not wait
forever, because its caller may hold a handler's lock.
"""


class LoopLogs:
    """Queues log records from this process's event loops, and handles them on its own thread."""

    def __init__(self) -> None:
        self._loops: set[int] = set()
        """The ids of the threads that run an event loop."""
        self._thread = 0
        self._queue: deque[tuple[logging.Logger, logging.LogRecord] | Any] = deque()
        """The records to handle, and the locks of callers that wait until all earlier records are
        handled.
        """
        self._dropped_count = 0
        self._wake = threading.Lock()
        """A lock that is held while no records are waiting. A `queue.Queue` could deadlock, because
        a finalizer may log while the same thread is adding a record.
        """
        self._wake.acquire()

    def start(self) -> None:
        """Start the thread unless it is already running. Raises RuntimeError if the system cannot
        start it.
        """
        if not self._thread:
            thread = threading.Thread(target=self._run, name="keylane logs", daemon=True)
            thread.start()
            self._thread = thread.ident or 0
        _install()

    def register(self) -> None:
        """Register the calling thread, which runs an event loop."""
        self._loops.add(get_ident())

    def unregister(self) -> None:
        """Unregister the calling thread, which no longer runs an event loop."""
        self._loops.discard(get_ident())

    def accept(self, logger: logging.Logger, record: logging.LogRecord) -> bool:
        """Queue the record if the calling thread runs an event loop. Return True if it was
        queued.
        """
        if get_ident() not in self._loops or not self._thread:
            return False
        if len(self._queue) < RECORDS_MAX:
            self._enqueue((logger, record))
        else:
            self._dropped_count += 1
        return True

    def wait_until_handled(self) -> None:
        """Wait until the queued records are handled, for at most SETTLE_S."""
        if self._queue and get_ident() != self._thread:
            handled_lock = threading.Lock()
            handled_lock.acquire()
            self._enqueue(handled_lock)
            handled_lock.acquire(timeout=SETTLE_S)

    def _enqueue(self, item: Any) -> None:
        self._queue.append(item)
        with suppress(RuntimeError):  # the thread is already awake
            self._wake.release()

    def _run(self) -> None:
        while True:
            self._wake.acquire()
            while self._queue:
                item = self._queue[0]  # stays queued until it is handled, for `wait_until_handled`
                try:
                    self._handle_item(item)
                except ClosedError:
                    pass  # a handler sends records through the client that is being closed
                except BaseException:  # noqa: BLE001 - a log handler raised
                    sys.excepthook(*sys.exc_info())
                self._queue.popleft()

    def _handle_item(self, item: Any) -> None:
        if not isinstance(item, tuple):
            item.release()
            return
        _original_handlers[0](*item)
        if self._dropped_count:
            dropped_count = self._dropped_count
            self._dropped_count = 0
            logging.getLogger("keylane.sync").warning(
                "%d log records were dropped, because the log handlers are too slow", dropped_count
            )


LOGS = LoopLogs()
_original_handlers: list[Callable[[logging.Logger, logging.LogRecord], None]] = []
"""The original `Logger.callHandlers`, after `_install` has replaced it."""


def _install() -> None:
    """Make all loggers of the process offer records to LOGS first, because the program's codecs and
    partitioners log on an event loop too.
    """
    if not _original_handlers:
        _original_handlers.append(logging.Logger.callHandlers)
        logging.Logger.callHandlers = _call_handlers  # type: ignore[assignment, method-assign]


def _call_handlers(logger: logging.Logger, record: logging.LogRecord) -> None:
    if not LOGS.accept(logger, record):
        _original_handlers[0](logger, record)


def _reset_in_child() -> None:
    """Start without threads in a forked child."""
    global LOGS  # noqa: PLW0603 - a process has one
    LOGS = LoopLogs()


at_fork(_reset_in_child)
