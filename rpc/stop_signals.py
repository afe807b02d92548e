"""SIGTERM and SIGINT as an event, for programs that hand over work before they end.

    first signal ─▶ every open StopSignals is notified
    second signal ─▶ only the earlier handler gets it, at once

The handlers are installed with `signal.signal`, not in the event loop. So handlers that a user
gave to the loop run too, and earlier handlers can be read and restored.
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
    """Sets `event` when its program is asked to stop, between `__enter__` and `__exit__`."""

    event: asyncio.Event

    def __enter__(self) -> Self:
        """Begin to listen."""
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

    The earlier handler is also called, but does not interrupt the program: the handler of
    `asyncio.run` is left out, and a KeyboardInterrupt is dropped, which Python's handler of SIGINT
    raises, and PySpark's after it has canceled its jobs. The second signal goes only to the
    earlier handler; by default, and under `asyncio.run`, it ends the process. An ignored signal
    stays ignored. Outside the main thread no handler is installed, because Python lets only the
    main thread handle signals.
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

    def tell(self) -> None:
        """Set `event`; safe inside a signal handler."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self.event.set)


_listening: dict[StopSignals, None] = {}
"""Open objects, in the order of their opening."""
_before: dict[int, Any] = {}
"""Handler by signal, from before the first of them was opened; it is restored when the last one is
closed.
"""
_came = False
"""True if a signal has arrived since the first of them was opened."""


def _open(signals: StopSignals) -> None:
    _listening[signals] = None
    if _came:
        signals.tell()
    if len(_listening) > 1:
        return
    for number in NUMBERS:
        before = signal.getsignal(number)
        if before not in {None, signal.SIG_IGN}:  # None: not Python's, so it could not be restored
            _before[number] = before
            signal.signal(number, _handle)


def _close(signals: StopSignals) -> None:
    global _came  # noqa: PLW0603  a process has one set of signal handlers
    del _listening[signals]
    if _listening:
        return
    _came = False
    for number in list(_before):
        _restore(number)


def _restore(number: int) -> Any:
    """Restore the earlier handler, unless other code has installed a newer one, and return the
    earlier handler.
    """
    before = _before.pop(number)
    if signal.getsignal(number) is _handle:
        signal.signal(number, before)
    return before


def _handle(number: int, frame: FrameType | None) -> None:
    global _came  # noqa: PLW0603  a process has one set of signal handlers
    if _came:
        before = _restore(number)
        if callable(before) and not _is_of_a_runner(before):
            before(number, frame)
        else:
            # The handler of asyncio.run would cancel the main task, and wait for tasks that ignore
            # the cancellation.
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        return
    _came = True
    before = _before[number]
    for signals in list(_listening):
        signals.tell()
    if callable(before) and not _is_of_a_runner(before):
        with contextlib.suppress(KeyboardInterrupt):
            before(number, frame)


def _is_of_a_runner(handler: Any) -> bool:
    """Return True for the handler of SIGINT that `asyncio.run` installs."""
    if isinstance(handler, functools.partial):
        handler = handler.func
    return isinstance(getattr(handler, "__self__", None), asyncio.Runner)
