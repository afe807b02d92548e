"""Asks the user whether a command may go on. Ctrl-C ends the command at once."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

import click

from ..protocol.errors import ConfigError
from .screen import show_line

INTERRUPTED = 130
"""Exit status after Ctrl-C."""


class _InterruptedError(Exception):
    """Ctrl-C was pressed at a question; click would take a KeyboardInterrupt for a "no"."""


def will_ask(*, yes: bool) -> bool:
    """Return True if `confirm` will ask, which it does on a terminal without --yes."""
    return not yes and sys.stdin.isatty()


def confirm(question: str, *, yes: bool, required: bool = False) -> None:
    """
    Ask the user for confirmation, and exit with status 1 if they decline, or 130 after Ctrl-C. Does
    not ask if `yes` is set or standard input is not a terminal.

    Args:
        required: without a terminal, `yes` has to be set.

    Raises:
        ConfigError: the confirmation is required, and nobody can be asked.
    """
    if required and not (yes or sys.stdin.isatty()):
        raise ConfigError(f"{question}  This is not a terminal: pass --yes to confirm.")
    if not will_ask(yes=yes):
        return
    try:
        with handling_interrupts(_end_question):
            click.confirm(question, abort=True, err=True)
    except _InterruptedError:
        sys.stderr.write("\n")
        show_line("interrupted: nothing was changed", errors=True)
        raise click.exceptions.Exit(INTERRUPTED) from None


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
