"""A program at a terminal of its own, whose keys a test presses."""

from __future__ import annotations

import os
import pty
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

LIMIT_S = 60.0
CTRL_C = "\x03"
_TAKE_TERMINAL = (
    "import fcntl, runpy, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); "
    "sys.argv = sys.argv[1:]; runpy.run_module(sys.argv[0], run_name='__main__', alter_sys=True)"
)
"""Ctrl-C is a signal only for the processes whose controlling terminal it is typed at."""


class KeyedTerminal:
    """What a program shows, and what is typed; output and errors are one text."""

    def __init__(self, process: subprocess.Popen[bytes], screen: int) -> None:
        self._process = process
        self._screen = screen
        self.shown = ""

    def wait_for(self, text: str) -> None:
        """Wait until the program has shown a text."""
        limit_s = time.monotonic() + LIMIT_S
        while text not in self.shown:
            assert time.monotonic() < limit_s, f"{text!r} is not in {self.shown!r}"
            assert self._read(), f"the program ended: {self.shown!r}"

    def press(self, keys: str) -> None:
        os.write(self._screen, keys.encode())

    def end(self) -> int:
        """Wait for the end of the program, and return its status."""
        while self._read():
            pass
        return self._process.wait(LIMIT_S)

    def _read(self) -> bool:
        """Read what the program shows next; return False after its end."""
        if not select.select([self._screen], [], [], LIMIT_S)[0]:
            raise TimeoutError(f"the program shows nothing more after {self.shown!r}")
        try:
            part = os.read(self._screen, 65536)
        except OSError:  # the program has closed it
            return False
        self.shown += part.decode(errors="replace").replace("\r\n", "\n")
        return bool(part)


@contextmanager
def at_terminal(*arguments: str) -> Iterator[KeyedTerminal]:
    """Run `keylane ARGUMENTS` at a terminal; it is killed at the end if it still runs."""
    screen, program_side = pty.openpty()
    try:
        process = subprocess.Popen(
            [sys.executable, "-c", _TAKE_TERMINAL, "keylane.cli", *arguments],
            stdin=program_side,
            stdout=program_side,
            stderr=program_side,
            start_new_session=True,
        )
    finally:
        os.close(program_side)
    try:
        yield KeyedTerminal(process, screen)
    finally:
        process.kill()
        process.wait()
        os.close(screen)
