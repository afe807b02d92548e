"""Shows on a terminal what a command is doing and for how long, from the third second on.

    waiting for 127.0.0.1:7000, 12 s

The line is printed on standard error. If that is not a terminal, programs and log files see
nothing, or a line for each change of a long wait.
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
LINES_S = 10.0
"""The shortest time between two lines where standard error is not a terminal."""
_CLEAR = "\r\033[K"


@contextmanager
def showing(text: str | Callable[[], str], *, advice: str = "") -> Iterator[None]:
    """
    Show a text, or what a function returns each time it is called, until the block ends.

    Args:
        advice: said once where standard error is not a terminal; without it, nothing is shown
            there.
    """
    stopped = threading.Event()
    if sys.stderr.isatty():
        thread = threading.Thread(target=_show, args=(text, stopped, time.monotonic()))
    elif advice:
        thread = threading.Thread(target=_print_changes, args=(text, advice, stopped))
    else:
        yield
        return
    thread.daemon = True
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
            what = _text_now(text)
            # The cursor stays at the beginning of the line, so that the next line of the command
            # replaces this one.
            sys.stderr.write(f"{_CLEAR}{what}, {time.monotonic() - began_s:.0f} s\r")
            sys.stderr.flush()
        if pause_s == EVERY_S:
            sys.stderr.write(_CLEAR)
            sys.stderr.flush()
    except OSError:
        pass  # the terminal is gone


def _print_changes(text: str | Callable[[], str], advice: str, stopped: threading.Event) -> None:
    shown, pause_s = "", FIRST_S
    try:
        while not stopped.wait(pause_s):
            pause_s = LINES_S
            what = _text_now(text)
            if what != shown:
                line = what if shown else f"{what}. {advice}"
                print(line, file=sys.stderr, flush=True)
                shown = what
    except OSError:
        pass  # nobody reads it


def _text_now(text: str | Callable[[], str]) -> str:
    return printable(text if isinstance(text, str) else text())
