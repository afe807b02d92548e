"""Whether a database's clock jumped: it is held against the boot clock of this machine, which never does.  Pure.

A reading of the database's clock was taken somewhere between asking and answer, so what passed here between two readings
is known to within both waits.  The database's clock must have advanced by as much, but for drift.

Limits: a jump below the tolerance, and one while no metaserver looks, are not seen.
"""

from __future__ import annotations

from typing import NamedTuple

TOLERANCE_MS = 50
DRIFT_SHARE = 10
"""One part in so many: how fast a time server may pull a clock back to the right time."""


class ClockReading(NamedTuple):
    """The database's time, and this machine's boot-time clock before and after; milliseconds."""

    asked_ms: int
    told_ms: int
    answered_ms: int


class ClockWatch:
    """The last reading that fitted the one before."""

    def __init__(self) -> None:
        self._last: ClockReading | None = None

    def jump_ms(self, now: ClockReading) -> int:
        """By how much, at least, the database's clock jumped ahead (back: negative); 0 makes `now` the last reading."""
        last = self._last
        if last is not None:
            told = now.told_ms - last.told_ms
            least, most = now.asked_ms - last.answered_ms, now.answered_ms - last.asked_ms
            tolerance = TOLERANCE_MS + abs(most) // DRIFT_SHARE
            if told > most + tolerance:
                return told - most
            if told < least - tolerance:
                return told - least
        if last is None or now.asked_ms >= last.asked_ms:
            self._last = now
        return 0

    def restart(self) -> None:
        """What was stored before a jump was made to fit: the next reading is the first."""
        self._last = None
