"""SIGTERM and SIGINT as an event for those who have something to hand over first.

    first signal ─▶ every open StopSignals is told        second signal ─▶ what stood before gets it, at once

The handlers are Python's own (`signal.signal`), not the event loop's: so they run beside those that a user has given
to the loop, and what stood before can be read and put back.
"""

from __future__ import annotations

import asyncio
import functools
import signal
import threading
from types import FrameType, TracebackType
from typing import Any, Self

NUMBERS = (signal.SIGTERM, signal.SIGINT)


class StopSignals:
    """
    Sets `event` at the first SIGTERM or SIGINT between `__enter__` and `__exit__`.

    A handler that stood before is called as well, unless it is only there to interrupt the program: Python's for
    SIGINT, or `asyncio.run`'s.  The second signal goes to what stood before alone; by default, and under `asyncio.run`,
    it ends the process.
    An ignored signal stays ignored.  In a thread that is not the main one nothing is installed: Python lets only the
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
        """A signal came; safe inside a signal handler."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self.event.set)


_told: dict[StopSignals, None] = {}
"""Those that are open."""
_before: dict[int, Any] = {}
"""By signal: the handler that stood before the first of them, and stands again after the last."""
_came = False
"""A signal has come since the first of them."""


def _open(signals: StopSignals) -> None:
    _told[signals] = None
    if _came:
        signals.tell()
    if len(_told) > 1:
        return
    for number in NUMBERS:
        before = signal.getsignal(number)
        if before not in {None, signal.SIG_IGN}:  # None: not Python's, so it could not be put back
            _before[number] = before
            signal.signal(number, _handle)


def _close(signals: StopSignals) -> None:
    global _came  # noqa: PLW0603  a process has one set of signal handlers
    del _told[signals]
    if _told:
        return
    _came = False
    for number in list(_before):
        _restore(number)


def _restore(number: int) -> Any:
    """Put back what stood before, unless somebody has installed another one meanwhile; what stood before."""
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
            # asyncio.run's handler would cancel the main task and wait for whoever ignores that.
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        return
    _came = True
    before = _before[number]
    for signals in list(_told):
        signals.tell()
    if callable(before) and not _only_interrupts(before):
        before(number, frame)


def _only_interrupts(handler: Any) -> bool:
    """Is it Python's handler of SIGINT, or the one that `asyncio.run` puts in its place?"""
    return handler is signal.default_int_handler or _is_of_a_runner(handler)


def _is_of_a_runner(handler: Any) -> bool:
    """Is it the handler of SIGINT that `asyncio.run` installs?"""
    if isinstance(handler, functools.partial):
        handler = handler.func
    return isinstance(getattr(handler, "__self__", None), asyncio.Runner)
