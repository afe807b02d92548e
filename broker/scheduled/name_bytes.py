"""Counts bytes of scheduled messages by the beginnings of their subjects' names. A beginning that
was asked for is counted from then on. Pure.
"""

from __future__ import annotations

BEGINNINGS_MAX = 2_000
"""The number of beginnings that are counted. There are fewer limits than that; if more are asked
for, all are forgotten and counted again.
"""


class NameBytes:
    """Sums over all subjects whose names begin alike. There may be thousands of them, and each
    message asks for sums.
    """

    def __init__(self) -> None:
        self._of: dict[str, int] = {}
        """Subject → bytes, only for subjects that have some."""
        self._sums: dict[str, int] = {}
        """Beginning → bytes."""
        self._lengths: set[int] = set()
        """The lengths of the beginnings. A name has one beginning of each length."""

    def add(self, subject: str, size: int) -> None:
        """Add bytes to a subject, or subtract them if `size` is negative."""
        left = self._of.get(subject, 0) + size
        if left:
            self._of[subject] = left
        else:
            self._of.pop(subject, None)
        for length in self._lengths:
            if length <= len(subject) and (beginning := subject[:length]) in self._sums:
                self._sums[beginning] += size

    def of(self, pattern: str) -> int:
        """Return the bytes of a subject. For a beginning followed by `*`, return those of all
        subjects whose names begin with it.
        """
        if not pattern.endswith("*"):
            return self._of.get(pattern, 0)
        beginning = pattern[:-1]
        if beginning not in self._sums:
            if len(self._sums) >= BEGINNINGS_MAX:
                self._sums.clear()
                self._lengths.clear()
            self._sums[beginning] = sum(
                size for subject, size in self._of.items() if subject.startswith(beginning)
            )
            self._lengths.add(len(beginning))
        return self._sums[beginning]
