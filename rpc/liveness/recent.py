"""The names that were noted last; there may be any number in a long life, because servers return at
other addresses. Pure.
"""

from __future__ import annotations


class RecentNames:
    """
    A set of names that forgets those that were noted longest ago.

    Args:
        most: number of names that are kept.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._names: dict[str, None] = {}
        """Noted names, the latest one last."""

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __len__(self) -> int:
        return len(self._names)

    def add(self, name: str) -> None:
        """Note a name; a known one becomes the newest."""
        self._names.pop(name, None)
        self._names[name] = None
        if len(self._names) > self._most:
            del self._names[next(iter(self._names))]

    def discard(self, name: str) -> None:
        """Forget a name, if it is there."""
        self._names.pop(name, None)
