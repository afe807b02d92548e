"""Settles together the sessions that join a group together, so that partitions do not move from one
new session to the next. Pure.

    join asked ─▶ stored ─┐
    join asked ─▶ stored ─┼─▶ none is running, and PAUSE_MS of quiet for each ─▶ settled
    join asked ─▶ stored ─┘   but the first; at most GATHER_MS_MAX in all

If sessions were settled one by one, the n-th would take an n-th of all partitions from the earlier
ones, each of which has to hand over: 200 sessions of 1,000 partitions would cause 5,000 hand-overs
instead of none.

Invariants
    A session that joins alone does not wait.
    No session waits for longer than GATHER_MS_MAX, or an eighth of its ttl.
"""

from __future__ import annotations

GATHER_MS_MAX = 2_000
PAUSE_MS = 20
PAUSE_MS_MAX = 500
LOOK_MS = 20
"""Interval, in milliseconds, between two checks while joins are running."""


class Arrivals:
    """The running joins of one group, and the number of its sessions that are not settled yet."""

    def __init__(self) -> None:
        self._under_way = 0
        self._stored = 0
        self._last_ms = 0
        self._until_ms = 0

    @property
    def is_over(self) -> bool:
        """True if no join is running and no session waits to be settled."""
        return not (self._under_way or self._stored)

    def began(self) -> None:
        """Register the start of a join."""
        self._under_way += 1

    def ended(self, now_ms: int, *, ttl_ms: int | None) -> None:
        """Register the end of a join that stored a session with this ttl; None: the join failed."""
        self._under_way -= 1
        if ttl_ms is None:
            return
        until_ms = now_ms + longest_ms(ttl_ms)
        self._until_ms = min(self._until_ms, until_ms) if self._stored else until_ms
        self._stored += 1
        self._last_ms = now_ms

    def wait_ms(self, now_ms: int) -> int:
        """Return the time in milliseconds until the next check; 0: the group has to be
        settled now.
        """
        left_ms = self._until_ms - now_ms
        if not self._stored or left_ms <= 0:
            return 0
        quiet_ms = min(PAUSE_MS * (self._stored - 1), PAUSE_MS_MAX) - (now_ms - self._last_ms)
        return min(left_ms, max(quiet_ms, LOOK_MS if self._under_way else 0, 0))

    def settled(self) -> None:
        """Register that all stored sessions are about to be settled."""
        self._stored = 0


def longest_ms(ttl_ms: int) -> int:
    """Return the longest time, in milliseconds, for which a session with this ttl waits for
    others.
    """
    return min(GATHER_MS_MAX, ttl_ms // 8)
