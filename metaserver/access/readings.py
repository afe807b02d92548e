"""Decides which of several overlapping database reads has the newest result. Pure."""

from __future__ import annotations


class ReadOrder:
    """
    Orders reads of a state whose version increases with each change.

    Overlapping reads can end in any order, and each of them saw the database at some moment between
    its start and its end. The read with the higher version is newer. A read that started after the
    newest one had ended is always newer, even if it has a lower version, because the database may
    have been restored from a backup.
    """

    def __init__(self) -> None:
        self._last_number = 0
        self._last_overlapping = 0
        """Number of the last read that had already started when the newest one ended."""
        self._newest_version = (0, 0)
        """Version and number of the newest read."""

    def begin(self) -> int:
        """Register the start of a read and return its number."""
        self._last_number += 1
        return self._last_number

    def is_newest(self, number: int, version: int) -> bool:
        """Register the end of a read. Return True if it is newer than all reads that ended
        before.
        """
        if number <= self._last_overlapping and (version, number) < self._newest_version:
            return False
        self._newest_version = (version, number)
        self._last_overlapping = self._last_number
        return True
