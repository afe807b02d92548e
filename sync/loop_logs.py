"""What is logged on an event loop of keylane.sync is handled on a thread of its own.

    event loop ── record ──▶ queue ──▶ thread "keylane logs" ──▶ handlers of the program

A handler has a lock, which its caller holds while the handler works.  One that sends what it is
given through a producer of keylane.sync waits for an event loop; if that loop waited for the lock,
neither would ever go on.

Invariants
    An event loop waits for no handler: records beyond RECORDS_MAX are dropped, and their number is
    logged. Records keep their order.  They are handled before the `stop` of their thread returns,
    within SETTLE_S.
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
SETTLE_S = 0.2
"""How long a client that is closed waits for handlers: its caller may hold the lock of one of
them.
"""


class LoopLogs:
    """The event loops of this process, and the records that wait."""

    def __init__(self) -> None:
        self._loops: set[int] = set()
        """The threads of event loops."""
        self._thread = 0
        self._waiting: deque[tuple[logging.Logger, logging.LogRecord] | Any] = deque()
        """Records, and locks of callers who wait until what is before them is handled."""
        self._dropped = 0
        self._wake = threading.Lock()
        """Held while nothing waits.  No queue of the library: a finalizer may log while this thread
        puts a record.
        """
        self._wake.acquire()

    def start(self) -> None:
        """Start the thread, if it does not run.  Raises RuntimeError: the system gives none."""
        if not self._thread:
            thread = threading.Thread(target=self._run, name="keylane logs", daemon=True)
            thread.start()
            self._thread = thread.ident or 0
        _install()

    def enter(self) -> None:
        """The calling thread is that of an event loop."""
        self._loops.add(get_ident())

    def leave(self) -> None:
        """It is so no more."""
        self._loops.discard(get_ident())

    def takes(self, logger: logging.Logger, record: logging.LogRecord) -> bool:
        """True if the record is handled later, because the caller is an event loop."""
        if get_ident() not in self._loops or not self._thread:
            return False
        if len(self._waiting) < RECORDS_MAX:
            self._put((logger, record))
        else:
            self._dropped += 1
        return True

    def settle(self) -> None:
        """Wait until the records so far are handled, for SETTLE_S at most."""
        if self._waiting and get_ident() != self._thread:
            handled = threading.Lock()
            handled.acquire()
            self._put(handled)
            handled.acquire(timeout=SETTLE_S)

    def _put(self, each: Any) -> None:
        self._waiting.append(each)
        with suppress(RuntimeError):  # the thread is awake already
            self._wake.release()

    def _run(self) -> None:
        while True:
            self._wake.acquire()
            while self._waiting:
                each = self._waiting[0]  # it stays until it is handled: `settle` waits for it
                try:
                    self._handle(each)
                except BaseException:  # noqa: BLE001 - of a handler; its caller was the event loop
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
                "%d lines of the log were dropped: its handlers take too long", dropped
            )


LOGS = LoopLogs()
_installed: list[Callable[[logging.Logger, logging.LogRecord], None]] = []
"""What called the handlers of a logger before, once `_install` has replaced it."""


def _install() -> None:
    """Have every logger ask first: codecs and partitioners of the program log on an event loop
    too.
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
