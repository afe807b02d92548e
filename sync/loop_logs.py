"""Handles the log records of keylane.sync's event loops on a thread of their own.

    event loop ── record ──▶ queue ──▶ thread "keylane logs" ──▶ handlers of the program

A log handler has a lock, which its caller holds while the handler works. A handler that sends its
records with a producer of keylane.sync waits for an event loop. If that loop logged and waited for
the lock, the two would wait for each other forever.

Invariants
    An event loop waits for no handler: records beyond RECORDS_MAX are dropped, and their number is
    logged.
    Records keep their order. They are handled before the `stop` of their loop's thread returns,
    which waits for SETTLE_S at most.
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

from ..rpc.home import at_fork

RECORDS_MAX = 10_000
"""Number of records that may wait for the handlers."""
SETTLE_S = 0.2
"""Seconds that a closing client waits for the handlers; its caller may hold the lock of one of
them, so it must not wait forever.
"""


class LoopLogs:
    """The event loops of this process, and the records that wait for the handlers."""

    def __init__(self) -> None:
        self._loops: set[int] = set()
        """Ids of the threads that run an event loop."""
        self._thread = 0
        self._waiting: deque[tuple[logging.Logger, logging.LogRecord] | Any] = deque()
        """Records, and locks of callers who wait until all earlier records are handled."""
        self._dropped = 0
        self._wake = threading.Lock()
        """A lock that is held while no records wait. A `queue.Queue` would deadlock: a finalizer
        may log while the same thread puts a record.
        """
        self._wake.acquire()

    def start(self) -> None:
        """Start the thread unless it runs; raise RuntimeError if the system cannot start one."""
        if not self._thread:
            thread = threading.Thread(target=self._run, name="keylane logs", daemon=True)
            thread.start()
            self._thread = thread.ident or 0
        _install()

    def enter(self) -> None:
        """Note that the calling thread runs an event loop."""
        self._loops.add(get_ident())

    def leave(self) -> None:
        """Note that the calling thread no longer runs an event loop."""
        self._loops.discard(get_ident())

    def takes(self, logger: logging.Logger, record: logging.LogRecord) -> bool:
        """Queue the record and return True if the caller is an event loop."""
        if get_ident() not in self._loops or not self._thread:
            return False
        if len(self._waiting) < RECORDS_MAX:
            self._put((logger, record))
        else:
            self._dropped += 1
        return True

    def settle(self) -> None:
        """Wait until the records that are queued now are handled, for SETTLE_S at most."""
        if self._waiting and get_ident() != self._thread:
            handled = threading.Lock()
            handled.acquire()
            self._put(handled)
            handled.acquire(timeout=SETTLE_S)

    def _put(self, each: Any) -> None:
        self._waiting.append(each)
        with suppress(RuntimeError):  # the thread is already awake
            self._wake.release()

    def _run(self) -> None:
        while True:
            self._wake.acquire()
            while self._waiting:
                each = self._waiting[0]  # it stays queued until it is handled, for `settle`
                try:
                    self._handle(each)
                except BaseException:  # noqa: BLE001 - a handler raised; nobody waits for it
                    sys.excepthook(*sys.exc_info())
                self._waiting.popleft()

    def _handle(self, each: Any) -> None:
        if not isinstance(each, tuple):
            each.release()
            return
        _installed[0](*each)
        if self._dropped:
            dropped, self._dropped = self._dropped, 0
            logging.getLogger("keylane.sync").warning(
                "%d log records were dropped, because the log handlers are too slow", dropped
            )


LOGS = LoopLogs()
_installed: list[Callable[[logging.Logger, logging.LogRecord], None]] = []
"""The original `Logger.callHandlers`, after `_install` has replaced it."""


def _install() -> None:
    """Let every logger of the process ask LOGS first, because codecs and partitioners of the
    program log on an event loop too.
    """
    if not _installed:
        _installed.append(logging.Logger.callHandlers)
        logging.Logger.callHandlers = _call_handlers  # type: ignore[assignment, method-assign]


def _call_handlers(logger: logging.Logger, record: logging.LogRecord) -> None:
    if not LOGS.takes(logger, record):
        _installed[0](logger, record)


def _in_child() -> None:
    """Forget the parent's threads."""
    global LOGS  # noqa: PLW0603 - a process has one
    LOGS = LoopLogs()


at_fork(_in_child)
