"""The connection slots of a server. When all are taken, each principal gets an equal share. Pure.

    acquire(connection, principal) ─▶ free slot? ─no─▶ principal below its share? ─no─▶ refused
                                                               │yes
                                                               ▼
                      evict the newest connection of the principal with the most slots

Invariants
    The number of connections with a slot never exceeds the limit.
    A principal loses a slot only while it has more than its equal share, and only to a principal
    that has less.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Generic, NamedTuple, TypeVar

C = TypeVar("C", bound=Hashable)


class SlotGrant(NamedTuple, Generic[C]):
    """The result of `ConnectionSlots.acquire`."""

    is_granted: bool
    evicted_connection: C | None = None
    """The connection that lost its slot to the new one."""
    evicted_principal: str = ""
    """The principal of the evicted connection."""
    evicted_count: int = 0
    """The number of slots that the evicted principal had."""


class ConnectionSlots(Generic[C]):
    """
    One server's slots for connections whose principals are known.

    Args:
        limit: the number of slots.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._principals: dict[C, str] = {}
        """The principal of each connection."""
        self._connections: dict[str, dict[C, None]] = {}
        """The connections of each principal, oldest first."""

    def count(self, principal: str) -> int:
        """Return the number of a principal's connections."""
        return len(self._connections.get(principal, ()))

    def acquire(self, connection: C, principal: str) -> SlotGrant[C]:
        """Give a slot to a connection. Nothing changes if it is refused."""
        grant: SlotGrant[C] = SlotGrant(True)
        if len(self._principals) >= self.limit and connection not in self._principals:
            principal_count = len(self._connections) + (principal not in self._connections)
            share = max(1, self.limit // principal_count)
            # Checked before all principals are searched, because refused callers retry.
            if self.count(principal) >= share:
                return SlotGrant(False)
            largest = max(self._connections, key=self.count)
            if self.count(largest) <= share:
                return SlotGrant(False)
            # Older connections are kept.
            newest = next(reversed(self._connections[largest]))
            grant = SlotGrant(True, newest, largest, self.count(largest))
            self.release(newest)
        self.release(connection)
        self._principals[connection] = principal
        self._connections.setdefault(principal, {})[connection] = None
        return grant

    def release(self, connection: C) -> None:
        """Release a connection's slot, if it has one."""
        principal = self._principals.pop(connection, None)
        if principal is None:
            return
        connections = self._connections[principal]
        del connections[connection]
        if not connections:
            del self._connections[principal]
