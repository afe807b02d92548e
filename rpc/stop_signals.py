"""Turns SIGTERM and SIGINT into an event, for programs that hand over work before they exit.

    first signal ─▶ every open StopSignals is notified, and the earlier handler called
    second signal ─▶ only the earlier handler is called

The handlers are installed with `signal.signal` instead of in the event loop, so that handlers that
a user has added to the loop still run, and earlier handlers can be read and restored.
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
    """Sets `event` when the program is asked to stop; listens between `__enter__` and
    `__exit__`.
    """

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
    Sets `event` on the first SIGTERM or SIGINT between `__enter__` and `__exit__`.

    The earlier handler is called too, but must not interrupt the program. So the handler of
    `asyncio.run` is skipped, and a KeyboardInterrupt is dropped; Python's SIGINT handler raises
    one, and so does PySpark's after it has canceled its jobs. The second signal only goes to the
    earlier handler, which by default, and under `asyncio.run`, ends the process. An ignored signal
    remains ignored. Outside the main thread no handler is installed, because Python only handles
    signals in the main thread.
    """

    def __init__(self) -> None:
        self.event = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._installed = False

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._installed = True
            _add_listener(self)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._installed:
            self._installed = False
            _remove_listener(self)

    def notify(self) -> None:
        """Set `event`. This is safe inside a signal handler."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self.event.set)


_open_signals: dict[StopSignals, None] = {}
"""The open StopSignals, in the order in which they were opened."""
_previous_handlers: dict[int, Any] = {}
"""The handlers that were installed when the first StopSignals was opened, by signal. They are
restored when the last one is closed.
"""
_is_signaled = False
"""True if a signal has arrived since the first StopSignals was opened."""


def is_signaled() -> bool:
    """Return True if a signal stops the program, so that a second one ends the process."""
    return _is_signaled


def _add_listener(signals: StopSignals) -> None:
    _open_signals[signals] = None
    if _is_signaled:
        signals.notify()
    if len(_open_signals) > 1:
        return
    for number in NUMBERS:
        previous_handler = signal.getsignal(number)
        if previous_handler not in {
            None,
            signal.SIG_IGN,
        }:  # None: not set from Python, so it cannot be restored
            _previous_handlers[number] = previous_handler
            signal.signal(number, _handle_signal)


def _remove_listener(signals: StopSignals) -> None:
    global _is_signaled  # noqa: PLW0603  a process has one set of signal handlers
    del _open_signals[signals]
    if _open_signals:
        return
    _is_signaled = False
    for number in list(_previous_handlers):
        _restore(number)


def _restore(number: int) -> Any:
    """Restore the earlier handler, unless other code has installed a newer one. Return the earlier
    handler.
    """
    previous_handler = _previous_handlers.pop(number)
    if signal.getsignal(number) is _handle_signal:
        signal.signal(number, previous_handler)
    return previous_handler


def _handle_signal(number: int, frame: FrameType | None) -> None:
    global _is_signaled  # noqa: PLW0603  a process has one set of signal handlers
    if _is_signaled:
        previous_handler = _restore(number)
        if callable(previous_handler) and not _is_asyncio_runner(previous_handler):
            previous_handler(number, frame)
        else:
            # The handler of asyncio.run is not called: it would cancel the main task, and then wait
            # for tasks that ignore cancellation.
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        return
    _is_signaled = True
    previous_handler = _previous_handlers[number]
    for signals in list(_open_signals):
        signals.notify()
    if callable(previous_handler) and not _is_asyncio_runner(previous_handler):
        with contextlib.suppress(KeyboardInterrupt):
            previous_handler(number, frame)


def _is_asyncio_runner(handler: Any) -> bool:
    """Return True if this is the SIGINT handler that `asyncio.run` installs."""
    if isinstance(handler, functools.partial):
        handler = handler.func
    return isinstance(getattr(handler, "__self__", None), asyncio.Runner)
