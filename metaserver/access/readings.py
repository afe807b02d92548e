"""Finds the newest of several readings of one database that may overlap. Pure."""

from __future__ import annotations


class Readings:
    """
    The readings of something whose version rises with each change.

    Readings that overlap end in any order, and each saw the database at some moment between its
    begin and its end: among them the one with the higher version is newer. A reading that began
    after the newest one had ended is newer whatever its version is, because the database may have
    been restored from a backup.
    """

    def __init__(self) -> None:
        self._begun = 0
        self._overlapping = 0
        """Number of the last reading that had begun when the newest one ended."""
        self._newest = (0, 0)
        """Version and number of the newest reading."""

    def begin(self) -> int:
        """Return the number of a reading that begins now."""
        self._begun += 1
        return self._begun

    def is_newest(self, number: int, version: int) -> bool:
        """Register the end of a reading; returns True if it is newer than all that ended before."""
        if number <= self._overlapping and (version, number) < self._newest:
            return False
        self._newest = (version, number)
        self._overlapping = self._begun
        return True
