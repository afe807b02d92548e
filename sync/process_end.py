"""Calls that are made when this process ends, so that a client which is open then is closed.

A child of `multiprocessing` that was forked calls nothing of `atexit` before Python 3.13; the
finalizers of `multiprocessing` it calls at each end but `os._exit` and a signal.
"""

from __future__ import annotations

import atexit
import sys
from collections.abc import Callable
from typing import Any


class AtProcessEnd:
    """
    A call that is made once, at the end of this process, while it is `on`.

    Args:
        call: does nothing in a forked child.
    """

    def __init__(self, call: Callable[[], None]) -> None:
        self._call = call
        self._finalizer: Any = None
        """Of a child of `multiprocessing`."""

    def on(self) -> None:
        """Have the call made."""
        atexit.register(self._make)
        # What starts such a child has imported both modules; other programs need neither.
        process = sys.modules.get("multiprocessing.process")
        if process is not None and process.parent_process() is not None:
            from multiprocessing.util import Finalize

            self._finalizer = Finalize(None, self._make, exitpriority=0)

    def off(self) -> None:
        """Have it made no more."""
        atexit.unregister(self._make)
        if self._finalizer is not None:
            self._finalizer.cancel()
            self._finalizer = None

    def _make(self) -> None:
        self.off()  # a child that was spawned calls the functions of atexit too
        self._call()
