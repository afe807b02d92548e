"""Counts the bytes of scheduled messages by subject and by prefix of the subject's name. The sum
for a prefix is maintained from the first query for it. Pure.
"""

from __future__ import annotations

PREFIXES_MAX = 2_000
"""The maximum number of prefixes whose sums are maintained, which is more than there are limits. If
there are more, all sums are discarded.
"""


class BytesByName:
    """Maintains sums over all subjects with a common prefix, because there may be thousands of
    subjects, and the sums are needed for each message.
    """

    def __init__(self) -> None:
        self._by_subject: dict[str, int] = {}
        """Maps subjects to bytes, only for subjects with scheduled messages."""
        self._by_prefix: dict[str, int] = {}
        """Maps prefixes to bytes."""
        self._lengths: set[int] = set()
        """The distinct lengths of the prefixes."""

    def add(self, subject: str, size: int) -> None:
        """Add bytes to a subject. A negative `size` subtracts them."""
        total = self._by_subject.get(subject, 0) + size
        if total:
            self._by_subject[subject] = total
        else:
            self._by_subject.pop(subject, None)
        for length in self._lengths:
            if length <= len(subject) and (prefix := subject[:length]) in self._by_prefix:
                self._by_prefix[prefix] += size

    def bytes_of(self, pattern: str) -> int:
        """Return the bytes of a subject or, if `pattern` is a prefix followed by `*`, of all
        subjects with that prefix.
        """
        if not pattern.endswith("*"):
            return self._by_subject.get(pattern, 0)
        prefix = pattern[:-1]
        if prefix not in self._by_prefix:
            if len(self._by_prefix) >= PREFIXES_MAX:
                self._by_prefix.clear()
                self._lengths.clear()
            self._by_prefix[prefix] = sum(
                size for subject, size in self._by_subject.items() if subject.startswith(prefix)
            )
            self._lengths.add(len(prefix))
        return self._by_prefix[prefix]
