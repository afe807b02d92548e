"""SIGTERM and SIGINT as an event, for programs that hand over work before they exit.

    first signal ─▶ every open StopSignals is notified, and the earlier handler called
    second signal ─▶ only the earlier handler is called

The handlers are installed with `signal.signal` and not in the event loop: handlers that a user has
added to the loop run too, and earlier handlers can be read and restored.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import signal
import threading
from types import FrameType, TracebackType
from typing import Any, Protocol, Self

NUMBERS = (signal.SIGTERM, signal.SIGINT)


class Stopping(Protocol):
    """Sets `event` when the program is asked to stop, between `__enter__` and `__exit__`."""

    event: asyncio.Event

    def __enter__(self) -> Self:
        """Start listening."""
        ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Stop listening."""
        ...


class StopSignals:
    """
    Sets `event` at the first SIGTERM or SIGINT between `__enter__` and `__exit__`.

    The earlier handler is called too, but must not interrupt the program: the handler of
    `asyncio.run` is skipped, and a KeyboardInterrupt is dropped, as raised by Python's handler of
    SIGINT, and by PySpark's after it has canceled its jobs. The second signal goes only to the
    earlier handler; by default, and under `asyncio.run`, it ends the process. An ignored signal
    remains ignored. Outside the main thread no handler is installed, because Python handles signals
    only in the main thread.
    """

    def __init__(self) -> None:
        self.event = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._installed = False

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._installed = True
            _open(self)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._installed:
            self._installed = False
            _close(self)

    def notify(self) -> None:
        """Set `event`; this is safe inside a signal handler."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self.event.set)


_listening: dict[StopSignals, None] = {}
"""The open StopSignals, in the order of their opening."""
_earlier_handlers: dict[int, Any] = {}
"""The handlers that were installed when the first of them was opened, by signal; they are restored
when the last one is closed.
"""
_is_signaled = False
"""True if a signal has arrived since the first of them was opened."""


def _open(signals: StopSignals) -> None:
    _listening[signals] = None
    if _is_signaled:
        signals.notify()
    if len(_listening) > 1:
        return
    for number in NUMBERS:
        earlier = signal.getsignal(number)
        if earlier not in {None, signal.SIG_IGN}:  # None: not set from Python, cannot be restored
            _earlier_handlers[number] = earlier
            signal.signal(number, _handle)


def _close(signals: StopSignals) -> None:
    global _is_signaled  # noqa: PLW0603  a process has one set of signal handlers
    del _listening[signals]
    if _listening:
        return
    _is_signaled = False
    for number in list(_earlier_handlers):
        _restore(number)


def _restore(number: int) -> Any:
    """Restore the earlier handler unless other code has installed a newer one; return the earlier
    handler.
    """
    earlier = _earlier_handlers.pop(number)
    if signal.getsignal(number) is _handle:
        signal.signal(number, earlier)
    return earlier


def _handle(number: int, frame: FrameType | None) -> None:
    global _is_signaled  # noqa: PLW0603  a process has one set of signal handlers
    if _is_signaled:
        earlier = _restore(number)
        if callable(earlier) and not _is_asyncio_runner(earlier):
            earlier(number, frame)
        else:
            # Not the handler of asyncio.run: it would cancel the main task, and then wait for tasks
            # that ignore cancellation.
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        return
    _is_signaled = True
    earlier = _earlier_handlers[number]
    for signals in list(_listening):
        signals.notify()
    if callable(earlier) and not _is_asyncio_runner(earlier):
        with contextlib.suppress(KeyboardInterrupt):
            earlier(number, frame)


def _is_asyncio_runner(handler: Any) -> bool:
    """Return True for the SIGINT handler that `asyncio.run` installs."""
    if isinstance(handler, functools.partial):
        handler = handler.func
    return isinstance(getattr(handler, "__self__", None), asyncio.Runner)
