"""Asks the user whether a command may continue. Ctrl-C ends the command at once."""

from __future__ import annotations

import os
import select
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from io import UnsupportedOperation
from types import FrameType

import click

from ..protocol.errors import ConfigError
from ..protocol.text import printable
from .screen import show_line

INTERRUPTED = 130
"""Exit status after Ctrl-C."""


class _InterruptedError(Exception):
    """Ctrl-C was pressed at a question."""


def will_ask(*, yes: bool) -> bool:
    """Return True if `confirm` will ask, which it does on a terminal without --yes."""
    return not yes and sys.stdin.isatty()


def require_confirmation(question: str, *, yes: bool) -> None:
    """Raise ConfigError if the question is not answered by `yes`, and nobody can be asked."""
    if not (yes or sys.stdin.isatty()):
        raise ConfigError(f"{question} This is not a terminal: pass --yes to confirm.")


def confirm(question: str, *, yes: bool, required: bool = False) -> None:
    """
    Ask the user for confirmation, and exit with status 1 if they decline, or 130 after Ctrl-C. Does
    not ask if `yes` is set or standard input is not a terminal.

    Args:
        required: without a terminal, `yes` has to be set.

    Raises:
        ConfigError: the confirmation is required, and nobody can be asked.
    """
    if required:
        require_confirmation(question, yes=yes)
    if not will_ask(yes=yes):
        return
    try:
        with handling_interrupts(_end_question):
            is_confirmed = _ask(f"{printable(question)} [y/N]: ")
    except _InterruptedError:
        sys.stderr.write("\n")
        show_line("interrupted: nothing was changed", errors=True)
        raise click.exceptions.Exit(INTERRUPTED) from None
    if not is_confirmed:
        show_line("nothing was changed", errors=True)
        raise click.Abort


def _ask(prompt: str) -> bool:
    """Ask until the answer is yes or no, which the end of the input and an empty line are too."""
    while True:
        sys.stderr.write(prompt)
        sys.stderr.flush()
        _wait_for_line()
        line = sys.stdin.readline()
        answer = line.strip().lower()
        if answer in {"y", "yes"}:
            return True
        if answer in {"", "n", "no"}:
            if not line:
                sys.stderr.write("\n")
            return False
        show_line("answer y or n", errors=True)


def _wait_for_line() -> None:
    """
    Wait until a line can be read, or a signal arrives, whose handler is then called.

    A signal that arrives just before a read would not interrupt the read, but it leaves a byte in
    the pipe.
    """
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    before = signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    try:
        with suppress(UnsupportedOperation):  # not a file
            select.select([sys.stdin.fileno(), woken], [], [])
    finally:
        signal.set_wakeup_fd(before)
        os.close(woken)
        os.close(wake)


def _end_question(_signal: int, _frame: FrameType | None) -> None:
    raise _InterruptedError


def leave_interrupt(_signal: int, _frame: FrameType | None) -> None:
    """Do nothing: Ctrl-C is for another program that has the terminal, such as an editor."""


@contextmanager
def handling_interrupts(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """
    Handle Ctrl-C with `handler` in the block; a child process does not inherit it.

    The handler of the event loop would only cancel the command's task, which cannot end before the
    user has answered.
    """
    before = signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
