"""Calls that are made when this process ends, so that an open client is closed.

A forked child of `multiprocessing` calls no functions of `atexit` before Python 3.13. It does call
the finalizers of `multiprocessing`, unless it ends by `os._exit` or a signal.
"""

from __future__ import annotations

import atexit
import sys
from collections.abc import Callable
from typing import Any


class AtProcessEnd:
    """
    A call that is made once at the end of this process, if it is switched `on`.

    Args:
        call: the function to call; it must do nothing in a forked child.
    """

    def __init__(self, call: Callable[[], None]) -> None:
        self._call = call
        self._finalizer: Any = None
        """The finalizer in a child of `multiprocessing`; elsewhere None."""

    def on(self) -> None:
        """Let the call be made at the end of the process."""
        atexit.register(self._make)
        # A child of `multiprocessing` has imported both modules; other programs need neither.
        process = sys.modules.get("multiprocessing.process")
        if process is not None and process.parent_process() is not None:
            from multiprocessing.util import Finalize

            self._finalizer = Finalize(None, self._make, exitpriority=0)

    def off(self) -> None:
        """Let the call not be made."""
        atexit.unregister(self._make)
        if self._finalizer is not None:
            self._finalizer.cancel()
            self._finalizer = None

    def _make(self) -> None:
        self.off()  # a spawned child also calls the functions of atexit
        self._call()
