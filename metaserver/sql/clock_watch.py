"""Detects jumps of a database's clock with this machine's boot clock, which never jumps. Pure.

The database read its clock at some moment between question and answer, so that the time between two
readings is known here except for both round trips. The database's clock must have advanced by the
same time, except for drift.

Limits: a jump below the tolerance, or while no metaserver runs, is not detected.
"""

from __future__ import annotations

from typing import NamedTuple

TOLERANCE_MS = 50
DRIFT_SHARE = 10
"""Largest share by which a time server may slew a clock: one part in this many."""


class ClockReading(NamedTuple):
    """The database's time, and this machine's boot-time clock before and after, in milliseconds."""

    asked_ms: int
    database_ms: int
    answered_ms: int


class ClockWatch:
    """Compares each reading with the last consistent one."""

    def __init__(self) -> None:
        self._last: ClockReading | None = None

    def jump_ms(self, now: ClockReading) -> int:
        """Return the smallest number of milliseconds by which the database's clock may have jumped
        ahead, negative for back; 0: no jump, and the reading is kept.
        """
        last = self._last
        if last is not None:
            advanced = now.database_ms - last.database_ms
            least, most = now.asked_ms - last.answered_ms, now.answered_ms - last.asked_ms
            tolerance = TOLERANCE_MS + abs(most) // DRIFT_SHARE
            if advanced > most + tolerance:
                return advanced - most
            if advanced < least - tolerance:
                return advanced - least
        if last is None or now.asked_ms >= last.asked_ms:
            self._last = now
        return 0

    def restart(self) -> None:
        """Use the next reading as the first one, because the stored times were adapted to a
        jump.
        """
        self._last = None
