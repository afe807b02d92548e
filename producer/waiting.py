"""When people are told that messages wait: after five seconds, rarely again, and once when it is over.  Pure."""

from __future__ import annotations

FIRST_MS = 5_000
AGAIN_MS = 60_000
AGAIN_MS_MAX = 3_600_000


class WaitReport:
    """One wait after another of the same messages' place, as a partition; all times are boot milliseconds."""

    def __init__(self) -> None:
        self._since_ms: int | None = None
        self._next_ms = FIRST_MS
        self._told = False

    @property
    def since_ms(self) -> int | None:
        """When the wait began; None if there is none."""
        return self._since_ms

    def waits(self, now_ms: int) -> bool:
        """Messages wait now; True if that is to be told, after 5 s, 1 min, 2 min, 4 min … up to once an hour."""
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
        """Nothing waits now; milliseconds it took if a wait was told that ends here, else None."""
        since_ms, told = self._since_ms, self._told
        self._since_ms = None
        self._told = False
        return now_ms - since_ms if told and since_ms is not None else None
