"""Detects jumps of the database's clock by means of this machine's boot-time clock, which never
jumps. Pure.

The database reads its clock at some moment between the request and the reply, so the time between
two readings is known to within both round trips. Apart from drift, the database's clock must have
advanced by the same amount.

Jumps that are smaller than the tolerance, or that happen while no metaserver is running, are not
detected.
"""

from __future__ import annotations

from typing import NamedTuple

TOLERANCE_MS = 50
DRIFT_SHARE = 10
"""Reciprocal of the maximum rate at which a time server may slew a clock."""


class ClockReading(NamedTuple):
    """The database's time, and this machine's boot time before and after it was read, in
    milliseconds.
    """

    sent_ms: int
    database_ms: int
    received_ms: int


class ClockWatch:
    """Compares each reading of the database's clock with the last consistent one."""

    def __init__(self) -> None:
        self._last_reading: ClockReading | None = None

    def jump_ms(self, reading: ClockReading) -> int:
        """
        Return the minimum number of milliseconds by which the database's clock has jumped. The
        result is negative if the clock jumped back, and 0 if it did not jump.

        If there was no jump, later readings are compared with this one.
        """
        last_reading = self._last_reading
        if last_reading is not None:
            advance_ms = reading.database_ms - last_reading.database_ms
            elapsed_min_ms, elapsed_max_ms = (
                reading.sent_ms - last_reading.received_ms,
                reading.received_ms - last_reading.sent_ms,
            )
            tolerance_ms = TOLERANCE_MS + abs(elapsed_max_ms) // DRIFT_SHARE
            if advance_ms > elapsed_max_ms + tolerance_ms:
                return advance_ms - elapsed_max_ms
            if advance_ms < elapsed_min_ms - tolerance_ms:
                return advance_ms - elapsed_min_ms
        if last_reading is None or reading.sent_ms >= last_reading.sent_ms:
            self._last_reading = reading
        return 0

    def unread_ms(self, now_ms: int) -> int:
        """Return how long the clock was not read, in milliseconds; 0 if it never was."""
        last_reading = self._last_reading
        return 0 if last_reading is None else now_ms - last_reading.received_ms

    def restart(self) -> None:
        """Forget earlier readings, because the stored times have been adapted to a jump."""
        self._last_reading = None
