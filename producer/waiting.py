"""Decides when a log line says that messages wait: after five seconds, then ever more rarely, and at the end.  Pure."""

from __future__ import annotations

FIRST_MS = 5_000
AGAIN_MS = 60_000
AGAIN_MS_MAX = 3_600_000


class WaitReport:
    """The waits of one partition, one after another; all times are boot milliseconds."""

    def __init__(self) -> None:
        self._since_ms: int | None = None
        self._next_ms = FIRST_MS
        self._told = False

    @property
    def since_ms(self) -> int | None:
        """The start of the present wait; None if nothing waits."""
        return self._since_ms

    def waits(self, now_ms: int) -> bool:
        """Note that messages wait; True if a report is due: after 5 s, 1 min, 2 min, 4 min … at most an hour apart."""
        if self._since_ms is None:
            self._since_ms = now_ms
            self._next_ms = FIRST_MS
        waited_ms = now_ms - self._since_ms
        if waited_ms < self._next_ms:
            return False
        while self._next_ms <= waited_ms:
            grown = max(AGAIN_MS, 2 * self._next_ms)
            self._next_ms = min(grown, self._next_ms + AGAIN_MS_MAX)
        self._told = True
        return True

    def over(self, now_ms: int) -> int | None:
        """Note that nothing waits; returns the milliseconds of a wait that was reported and ends here, else None."""
        since_ms, told = self._since_ms, self._told
        self._since_ms = None
        self._told = False
        return now_ms - since_ms if told and since_ms is not None else None
