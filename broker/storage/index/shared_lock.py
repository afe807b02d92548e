"""A lock that many threads share or one thread holds alone. The index is reopened alone, and read
shared.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class SharedLock:
    """A readers-writer lock; a waiting writer keeps new readers out. Not reentrant."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._sharing = 0
        self._alone = False

    @contextmanager
    def shared(self) -> Iterator[None]:
        """Hold the lock together with other threads. A thread that holds it alone, or waits to do
        so, comes first.
        """
        with self._changed:
            while self._alone:
                self._changed.wait()
            self._sharing += 1
        try:
            yield
        finally:
            with self._changed:
                self._sharing -= 1
                if not self._sharing:
                    self._changed.notify_all()

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Hold the lock alone, once every thread that shares it has left."""
        with self._changed:
            while self._alone:
                self._changed.wait()
            self._alone = True
            while self._sharing:
                self._changed.wait()
        try:
            yield
        finally:
            with self._changed:
                self._alone = False
                self._changed.notify_all()
