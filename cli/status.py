"""Shows on a terminal what a command is doing and for how long, from the third second on.

    waiting for 127.0.0.1:7000, 12 s

The line is printed on standard error, and only if that is a terminal, so that programs and log
files never see it.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ..protocol.text import printable

FIRST_S = 2.0
EVERY_S = 0.5
_CLEAR = "\r\033[K"


@contextmanager
def showing(text: str | Callable[[], str]) -> Iterator[None]:
    """Show a text, or what a function returns each time it is called, until the block ends."""
    if not sys.stderr.isatty():
        yield
        return
    stopped = threading.Event()
    thread = threading.Thread(
        target=_show, args=(text, stopped, time.monotonic()), name="status", daemon=True
    )
    thread.start()
    try:
        yield
    finally:
        stopped.set()
        thread.join()


@contextmanager
def showing_progress(what: str) -> Iterator[Callable[[int, int], None]]:
    """Show what is done and, once it is known, how much of it. Yields the function to call with the
    amount that is done, and the total.
    """
    progress = (0, 0)

    def reach(done: int, total: int) -> None:
        nonlocal progress
        progress = (done, total)

    def text() -> str:
        share = percent(*progress)
        return f"{what}:{share}" if share else what

    with showing(text):
        yield reach


def percent(done: int, total: int) -> str:
    """Return the progress as a text such as " 12 %", or "" if the total is unknown."""
    return f" {100 * min(done, total) // total} %" if total > 0 else ""


def _show(text: str | Callable[[], str], stopped: threading.Event, began_s: float) -> None:
    pause_s = FIRST_S
    try:
        while not stopped.wait(pause_s):
            pause_s = EVERY_S
            what = printable(text if isinstance(text, str) else text())
            # The cursor stays at the beginning of the line, so that the next line of the command
            # replaces this one.
            sys.stderr.write(f"{_CLEAR}{what}, {time.monotonic() - began_s:.0f} s\r")
            sys.stderr.flush()
        if pause_s == EVERY_S:
            sys.stderr.write(_CLEAR)
            sys.stderr.flush()
    except OSError:
        pass  # the terminal is gone
