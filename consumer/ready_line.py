"""Prints that a consumer is running, for programs that never configured logging."""

from __future__ import annotations

import contextlib
import logging
import sys


def print_ready_line(name: str) -> None:
    """Print one line to standard error, if no log handler would show it and standard error is
    writable.
    """
    if sys.stderr is None or logging.getLogger("keylane.consumer").hasHandlers():
        return
    with contextlib.suppress(OSError, ValueError):  # it is closed
        sys.stderr.write(f"keylane: the {name} is running\n")
