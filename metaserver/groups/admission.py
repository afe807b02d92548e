"""When a consumer's join may begin: not while heartbeats are late.  Pure.

    join ─▶ a turn of its group is free, and heartbeats are on time ─▶ begins
         └▶ else it is asked again soon, and after a while told to come later

A join has the partitions of its group allocated anew, and so costs much more than a heartbeat.  If very many come at once,
all heartbeats wait behind them; sessions then end whose consumers join again, and no consumer keeps a lease for long.

Invariants
    While a heartbeat is late, one join a second begins: consumers come in, however slow the database is.
    Joins of one group do not wait for those of another, but for heartbeats of any.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable

AT_ONCE = 4
"""Joins of a group that run at once, at first: one more behind each quick one, one less behind a slow one."""
AT_ONCE_MAX = 64
"""They share allocations, so fewer take longer together."""
LATE_MS = 500
"""A renewal that takes longer is late: heartbeats come each 5 s at least, and leases last 30 s by default."""
SLOW_MS = 1_000
"""A join that takes longer is slow: others wait for the same database."""
LATE_PAUSE_MS = 1_000
"""The pause between two joins while renewals are late."""


class JoinAdmission:
    """The joins and renewals that one metaserver has under way; `now_ms` is a clock that never falls."""

    def __init__(self, now_ms: Callable[[], int]) -> None:
        self._now_ms = now_ms
        self._renewals: dict[int, int] = {}
        """Number → when it began, the oldest first."""
        self._number = 0
        self._late_until_ms = 0
        """A renewal was late a moment ago."""
        self._at_once = AT_ONCE
        self._joins: Counter[Hashable] = Counter()
        """Joins under way, by group."""
        self._began_ms: int | None = None

    def begin_renewal(self) -> int:
        """Note that sessions are being renewed; returns the argument of `end_renewal`."""
        self._number += 1
        self._renewals[self._number] = self._now_ms()
        return self._number

    def end_renewal(self, number: int) -> None:
        """Note that they are renewed, or were not."""
        now_ms = self._now_ms()
        if now_ms - self._renewals.pop(number) > LATE_MS:
            self._late_until_ms = now_ms + LATE_MS

    def _is_late(self, now_ms: int) -> bool:
        """Whether heartbeats are late."""
        oldest_ms = next(iter(self._renewals.values()), now_ms)
        return now_ms < self._late_until_ms or now_ms - oldest_ms > LATE_MS

    def begin_join(self, group: Hashable) -> bool:
        """Return whether a join of this group may begin now; if it may, it has begun."""
        now_ms = self._now_ms()
        if self._joins[group] >= self._at_once:
            return False
        waited = self._began_ms is None or now_ms >= self._began_ms + LATE_PAUSE_MS
        if self._is_late(now_ms) and not waited:
            return False
        self._joins[group] += 1
        self._began_ms = now_ms
        return True

    def end_join(self, group: Hashable, *, took_ms: int) -> None:
        """Note that a join has ended, and how long it took behind its beginning."""
        if took_ms > SLOW_MS:
            self._at_once = max(1, self._at_once - 1)
        elif took_ms <= LATE_MS:
            self._at_once = min(self._at_once + 1, AT_ONCE_MAX)
        self._joins[group] -= 1
        if not self._joins[group]:
            del self._joins[group]
