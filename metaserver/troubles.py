"""Tells troubles that come again and again: at once, then after 10, 20, 40 … s while they last.  Pure.

A metaserver whose disk fails asks it twice a second: each failure in the log made 7,000 lines an hour.
"""

from __future__ import annotations

FIRST_S = 10.0
MAX_S = 600.0


class Troubles:
    """Which troubles were told when.  One that was not met for long is new."""

    def __init__(self) -> None:
        self._told: dict[str, tuple[float, float]] = {}
        """Text → when it is told again, and the pause after that."""

    def is_told(self, text: str, now_s: float) -> bool:
        """Whether a trouble that was met is to be told now."""
        for old in [each for each, (at_s, pause_s) in self._told.items() if now_s > at_s + pause_s]:
            del self._told[old]
        at_s, pause_s = self._told.get(text, (now_s, FIRST_S))
        if now_s < at_s:
            return False
        self._told[text] = now_s + pause_s, min(2 * pause_s, MAX_S)
        return True
