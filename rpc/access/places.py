"""Decides whose connection has a place where all are taken: each principal that comes gets an equal
share.  Pure.

    take(connection, principal) ─▶ free place? ─no─▶ principal below its share? ─yes─▶ the newest of
        who has most leaves
                                                              │no
                                                              ▼
                                                         no place

Invariants
    There are never more connections with a place than places.
    A principal loses a connection only while it has more than an equal share, and only to one with
    less.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Generic, NamedTuple, TypeVar

C = TypeVar("C", bound=Hashable)


class Placing(NamedTuple, Generic[C]):
    """What became of a connection that asked for a place."""

    given: bool
    leaves: C | None = None
    """The connection that had the place before; it has none now."""
    holder: str = ""
    """Its principal."""
    held: int = 0
    """How many places its principal had."""


class Places(Generic[C]):
    """
    The places of one server for connections whose principals are known.

    Args:
        most: the number of places.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self._of: dict[C, str] = {}
        """Connection → its principal."""
        self._held: dict[str, dict[C, None]] = {}
        """Principal → its connections, the oldest first."""

    def held(self, principal: str) -> int:
        """The number of connections of a principal."""
        return len(self._held.get(principal, ()))

    def take(self, connection: C, principal: str) -> Placing[C]:
        """Give a connection a place, or leave it as it was."""
        leaving: Placing[C] = Placing(True)
        if len(self._of) >= self.most and connection not in self._of:
            share = max(1, self.most // (len(self._held) + (principal not in self._held)))
            # Before the look at all principals: who is refused comes again.
            if self.held(principal) >= share:
                return Placing(False)
            holder = max(self._held, key=self.held)
            if self.held(holder) <= share:
                return Placing(False)
            # The longer one is there, the longer it stays.
            newest = next(reversed(self._held[holder]))
            leaving = Placing(True, newest, holder, self.held(holder))
            self.free(newest)
        self.free(connection)
        self._of[connection] = principal
        self._held.setdefault(principal, {})[connection] = None
        return leaving

    def free(self, connection: C) -> None:
        """Note that a connection has no place any more; one without a place is none of these."""
        principal = self._of.pop(connection, None)
        if principal is None:
            return
        held = self._held[principal]
        del held[connection]
        if not held:
            del self._held[principal]
