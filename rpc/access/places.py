"""Decides which connections get a place if all are taken: each principal gets an equal share.
Pure.

    take(connection, principal) ─▶ free place? ─no─▶ principal below its share? ─no─▶ no place
                                                              │yes
                                                              ▼
                  the newest connection of the principal with most places loses its place

Invariants
    There are never more connections with a place than places.
    A principal loses a connection only while it has more than an equal share, and only to a
    principal with less.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Generic, NamedTuple, TypeVar

C = TypeVar("C", bound=Hashable)


class Placing(NamedTuple, Generic[C]):
    """The result of asking for a place."""

    given: bool
    leaves: C | None = None
    """Connection that had the place until now, and has none any more."""
    holder: str = ""
    """Principal of that connection."""
    held: int = 0
    """Number of places that this principal had."""


class Places(Generic[C]):
    """
    The places of one server for connections with known principals.

    Args:
        most: number of places.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self._of: dict[C, str] = {}
        """Principal of each connection."""
        self._held: dict[str, dict[C, None]] = {}
        """Connections of each principal, the oldest first."""

    def held(self, principal: str) -> int:
        """Return the number of connections of a principal."""
        return len(self._held.get(principal, ()))

    def take(self, connection: C, principal: str) -> Placing[C]:
        """Give a connection a place, or leave everything as it was."""
        leaving: Placing[C] = Placing(True)
        if len(self._of) >= self.most and connection not in self._of:
            share = max(1, self.most // (len(self._held) + (principal not in self._held)))
            # This comes before the look at all principals, because refused callers try again.
            if self.held(principal) >= share:
                return Placing(False)
            holder = max(self._held, key=self.held)
            if self.held(holder) <= share:
                return Placing(False)
            # The longest open connections stay longest.
            newest = next(reversed(self._held[holder]))
            leaving = Placing(True, newest, holder, self.held(holder))
            self.free(newest)
        self.free(connection)
        self._of[connection] = principal
        self._held.setdefault(principal, {})[connection] = None
        return leaving

    def free(self, connection: C) -> None:
        """Note that a connection no longer has a place; nothing happens if it has none."""
        principal = self._of.pop(connection, None)
        if principal is None:
            return
        held = self._held[principal]
        del held[connection]
        if not held:
            del self._held[principal]
