"""Programs of tests end with the process that started them, also when that is killed.

One that goes on would meet the next run: a client of it still calls the addresses that it was
given, and the next run's servers may listen there.
"""

from __future__ import annotations

import ctypes
import fcntl
import multiprocessing
import multiprocessing.connection
import os
import signal
from collections.abc import Callable

_LIBC = ctypes.CDLL(None)
"""Loaded before any fork: a child of a process with threads must not load anything."""
SET_PARENT_DEATH_SIGNAL = 1


def ending_with_parent(number: int = signal.SIGKILL) -> Callable[[], None]:
    """What `subprocess.Popen` runs in the child: it gets the signal when the thread that starts it
    ends.
    """
    parent = os.getpid()

    def ask() -> None:
        _LIBC.prctl(SET_PARENT_DEATH_SIGNAL, number)
        if os.getppid() != parent:
            os.kill(os.getpid(), number)  # it ended before

    return ask


def end_with_tests() -> None:
    """
    In a child of multiprocessing's fork server: be killed when the process that asked for it ends.

    The fork server is the parent, and it lives as long as any child. The kernel tells by a signal
    that the other end of a pipe is closed, so no thread has to wait for that.
    """
    asking = multiprocessing.parent_process()
    assert asking is not None
    pipe = asking.sentinel
    assert isinstance(pipe, int)
    fcntl.fcntl(pipe, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(pipe, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(pipe, fcntl.F_SETFL, fcntl.fcntl(pipe, fcntl.F_GETFL) | os.O_ASYNC)
    if multiprocessing.connection.wait([pipe], 0):
        os.kill(os.getpid(), signal.SIGKILL)  # it ended before
