"""Decides how long a group waits for more joins before its leases are settled. Pure.

    join requested ─▶ stored ─┐
    join requested ─▶ stored ─┼─▶ no join in flight, and a quiet time of ─▶ settled
    join requested ─▶ stored ─┘   QUIET_MS for each session after the first

Settling many new sessions together avoids moving partitions from one new session to the next. If
sessions were settled one by one, the n-th would take an n-th of all partitions from the earlier
ones, which would have to hand them over. With 200 sessions and 1,000 partitions, this would cause
5,000 hand-overs instead of none.

Invariants
    A session that joins alone does not wait.
    No session waits longer than GATHER_MS_MAX or an eighth of its ttl.
"""

from __future__ import annotations

GATHER_MS_MAX = 2_000
QUIET_MS = 20
QUIET_MS_MAX = 500
CHECK_MS = 20
"""Interval in milliseconds between checks while joins are in flight."""


class JoinWindow:
    """Tracks the joins of one group that are in flight, and its stored sessions that are not
    settled yet.
    """

    def __init__(self) -> None:
        self._in_flight = 0
        self._unsettled = 0
        self._last_join_ms = 0
        self._deadline_ms = 0

    @property
    def is_idle(self) -> bool:
        """True if no join is in flight and no session is waiting to be settled."""
        return not (self._in_flight or self._unsettled)

    def begin_join(self) -> None:
        """Record the start of a join."""
        self._in_flight += 1

    def end_join(self, now_ms: int, *, ttl_ms: int | None) -> None:
        """Record the end of a join: it stored a session with the given ttl, or failed if the ttl is
        None.
        """
        self._in_flight -= 1
        if ttl_ms is None:
            return
        deadline_ms = now_ms + join_window_ms_max(ttl_ms)
        self._deadline_ms = min(self._deadline_ms, deadline_ms) if self._unsettled else deadline_ms
        self._unsettled += 1
        self._last_join_ms = now_ms

    def wait_ms(self, now_ms: int) -> int:
        """Return the time in milliseconds until the next check, or 0 if the group must be settled
        now.
        """
        remaining_ms = self._deadline_ms - now_ms
        if not self._unsettled or remaining_ms <= 0:
            return 0
        quiet_remaining_ms = min(QUIET_MS * (self._unsettled - 1), QUIET_MS_MAX) - (
            now_ms - self._last_join_ms
        )
        return min(remaining_ms, max(quiet_remaining_ms, CHECK_MS if self._in_flight else 0, 0))

    def begin_settling(self) -> None:
        """Record that all stored sessions are about to be settled."""
        self._unsettled = 0


def join_window_ms_max(ttl_ms: int) -> int:
    """Return the maximum time, in milliseconds, that a session with this ttl may wait for other
    joins.
    """
    return min(GATHER_MS_MAX, ttl_ms // 8)
