"""Bytes of scheduled messages by the beginning of their subjects' names: one that was asked for is
counted from then on.  Pure.
"""

from __future__ import annotations

BEGINNINGS_MAX = 2_000
"""Beginnings that are counted; there are fewer limits, and of more all are forgotten and counted
anew.
"""


class NameBytes:
    """Sums over all subjects whose names begin alike: there may be thousands of these, and each
    message asks.
    """

    def __init__(self) -> None:
        self._of: dict[str, int] = {}
        """Subject → bytes; only of those that have some."""
        self._sums: dict[str, int] = {}
        """Beginning → bytes."""
        self._lengths: set[int] = set()
        """Of the beginnings: a name has one beginning of each."""

    def add(self, subject: str, size: int) -> None:
        """Count bytes of a subject, or take them off where `size` is negative."""
        left = self._of.get(subject, 0) + size
        if left:
            self._of[subject] = left
        else:
            self._of.pop(subject, None)
        for length in self._lengths:
            if length <= len(subject) and (beginning := subject[:length]) in self._sums:
                self._sums[beginning] += size

    def of(self, pattern: str) -> int:
        """The bytes of a subject; or, of a beginning and `*`, of all subjects that begin so."""
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
