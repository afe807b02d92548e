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
        self._last_number = 0
        self._last_overlapping = 0
        """Number of the last read that had started when the newest one ended."""
        self._newest_version = (0, 0)
        """Version and number of the newest read."""

    def begin(self) -> int:
        """Start a read, and return its number."""
        self._last_number += 1
        return self._last_number

    def is_newest(self, number: int, version: int) -> bool:
        """End a read; returns whether it is newer than all that ended before."""
        if number <= self._last_overlapping and (version, number) < self._newest_version:
            return False
        self._newest_version = (version, number)
        self._last_overlapping = self._last_number
        return True
