"""Sessions that join one group together are settled together: partitions do not wander from one
that joined to the next.  Pure.

    join asked ─▶ stored ─┐
    join asked ─▶ stored ─┼─▶ none under way, and quiet for PAUSE_MS for each one before the last ─▶ settled
    join asked ─▶ stored ─┘                                              at most GATHER_MS_MAX after the first

Settled one by one, the n-th session takes an n-th of all partitions from those before, each of
which has to hand over: 200 sessions of 1,000 partitions cause 5,000 hand-overs instead of none.

Invariants
    A session that joins alone waits for nothing.
    None waits for longer than GATHER_MS_MAX, or an eighth of its ttl.
"""

from __future__ import annotations

GATHER_MS_MAX = 2_000
PAUSE_MS = 20
PAUSE_MS_MAX = 500
LOOK_MS = 20
"""After which to look again while joins are under way."""


class Arrivals:
    """The joins of one group that are under way, and the sessions that are not settled yet."""

    def __init__(self) -> None:
        self._under_way = 0
        self._stored = 0
        self._last_ms = 0
        self._until_ms = 0

    @property
    def is_over(self) -> bool:
        """Whether nothing is under way or waits to be settled."""
        return not (self._under_way or self._stored)

    def began(self) -> None:
        """Note that a join was asked for."""
        self._under_way += 1

    def ended(self, now_ms: int, *, ttl_ms: int | None) -> None:
        """Note that a join has stored a session with this ttl; None: it has failed."""
        self._under_way -= 1
        if ttl_ms is None:
            return
        until_ms = now_ms + longest_ms(ttl_ms)
        self._until_ms = min(self._until_ms, until_ms) if self._stored else until_ms
        self._stored += 1
        self._last_ms = now_ms

    def wait_ms(self, now_ms: int) -> int:
        """For how long settling the group waits before it looks again; 0: it has to be settled
        now.
        """
        left_ms = self._until_ms - now_ms
        if not self._stored or left_ms <= 0:
            return 0
        quiet_ms = min(PAUSE_MS * (self._stored - 1), PAUSE_MS_MAX) - (now_ms - self._last_ms)
        return min(left_ms, max(quiet_ms, LOOK_MS if self._under_way else 0, 0))

    def settled(self) -> None:
        """Note that all sessions that are stored are about to be settled."""
        self._stored = 0


def longest_ms(ttl_ms: int) -> int:
    """How long a session with this ttl waits at most for others that join."""
    return min(GATHER_MS_MAX, ttl_ms // 8)
