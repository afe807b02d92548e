"""Decides how far a broker trusts the calendar. If the calendar jumps forward, nothing becomes old
or due by that before HOLD_MS have passed.

    agrees with the boot clock, is set back, or is set forward a little    trusted
    is set forward by more than FORWARD_MS between two looks               held: the earlier
                                                                           calendar continues
    is held, and right again within FORWARD_MS                             trusted
    is held for HOLD_MS by the boot clock, or an operator confirms it      trusted

If a calendar was wrong for a moment, messages that no group needs yet are still there afterwards,
and scheduled messages are delivered at their times.
"""

from __future__ import annotations

import logging

from ..protocol.clock import Clock

log = logging.getLogger("keylane.broker")

FORWARD_MS = 2 * 3_600_000
HOLD_MS = 24 * 3_600_000


class WallClock:
    """The calendar by which ages and times are judged. It begins with the machine's calendar, which
    must be right when this object is made.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._held_at_ms: int | None = None
        """The time of the boot clock, in milliseconds, at which the calendar was found to be set
        forward; None if it is trusted.
        """
        self.believe()

    def believe(self) -> None:
        """Trust the calendar as it is now."""
        self._take(self._clock.wall_ms(), self._clock.boot_ms())

    def _take(self, wall_ms: int, boot_ms: int) -> None:
        self._wall_ms = wall_ms
        self._boot_ms = boot_ms
        self._held_at_ms = None

    def now_ms(self) -> int:
        """Look at the calendar, and return the time to judge by, in milliseconds since 1970. Every
        check must call this.
        """
        wall_ms, boot_ms = self._clock.wall_ms(), self._clock.boot_ms()
        judged_ms = self._judged_ms(wall_ms, boot_ms)
        if judged_ms == wall_ms:
            # The judged reading is taken, not a later one: a calendar that is set in between would
            # otherwise be trusted.
            self._take(wall_ms, boot_ms)
        elif self._held_at_ms is None:
            self._held_at_ms = boot_ms
            log.warning("%s", self.problem)
        return judged_ms

    def reported_ms(self) -> int:
        """Return the time to judge by, like `now_ms`, but without a look: it changes nothing."""
        return self.both_ms()[0]

    def both_ms(self) -> tuple[int, int]:
        """Return the time of `reported_ms`, and the time of the machine's calendar, which is later
        while it is not trusted.
        """
        wall_ms = self._clock.wall_ms()
        return self._judged_ms(wall_ms, self._clock.boot_ms()), wall_ms

    def _judged_ms(self, wall_ms: int, boot_ms: int) -> int:
        """Return the time that counts. It differs from `wall_ms` if the calendar is not trusted."""
        expected_ms = self._wall_ms + boot_ms - self._boot_ms
        held_ms = 0 if self._held_at_ms is None else boot_ms - self._held_at_ms
        if wall_ms <= expected_ms + FORWARD_MS or held_ms >= HOLD_MS:
            return wall_ms
        return expected_ms

    @property
    def problem(self) -> str:
        """Why a different time counts, as the last look found it; "" if the calendar is trusted."""
        if self._held_at_ms is None:
            return ""
        boot_ms = self._clock.boot_ms()
        forward_ms = self._clock.wall_ms() - self._wall_ms - (boot_ms - self._boot_ms)
        left_ms = max(self._held_at_ms + HOLD_MS - boot_ms, 0)
        return (
            f"the calendar was set forward by {forward_ms / 3_600_000:.1f} hours: for "
            f"{left_ms / 3_600_000:.1f} more hours "
            "ages, and times of scheduled messages, are counted as if it was not; set it right, or "
            "send the broker SIGHUP if it is"
        )
