"""Decides which of several overlapping reads of one database has the newest result. Pure."""

from __future__ import annotations


class ReadOrder:
    """
    Orders reads of a state whose version rises with each change.

    Overlapping reads end in any order, and each saw the database at some moment between its start
    and its end: the read with the higher version is newer. A read that started after the newest one
    had ended is always newer, even with a lower version, because the database may have been
    restored from a backup.
    """

    def __init__(self) -> None:
        self._started = 0
        self._overlapping = 0
        """Number of the last read that had started when the newest one ended."""
        self._newest = (0, 0)
        """Version and number of the newest read."""

    def begin(self) -> int:
        """Start a read, and return its number."""
        self._started += 1
        return self._started

    def is_newest(self, number: int, version: int) -> bool:
        """End a read; returns whether it is newer than all that ended before."""
        if number <= self._overlapping and (version, number) < self._newest:
            return False
        self._newest = (version, number)
        self._overlapping = self._started
        return True
