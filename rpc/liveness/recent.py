"""A bounded set of recently used names. In a long-lived client, an unbounded set would grow
forever, because servers come back at other addresses. Pure.
"""

from __future__ import annotations


class RecentNames:
    """
    A set of names that forgets the least recently added ones.

    Args:
        limit: the maximum number of names.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._names: dict[str, None] = {}
        """The names, the latest one last."""

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __len__(self) -> int:
        return len(self._names)

    def add(self, name: str) -> None:
        """Add a name. A name that is already present becomes the latest."""
        self._names.pop(name, None)
        self._names[name] = None
        if len(self._names) > self._limit:
            del self._names[next(iter(self._names))]

    def discard(self, name: str) -> None:
        """Remove a name if it is present."""
        self._names.pop(name, None)
