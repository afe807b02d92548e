"""How far a broker believes the calendar: one that is set forward at once makes nothing old or due
before HOLD_MS have passed.

    calendar agrees with the boot clock, is set back, or is set forward a little    believed
    set forward by more than FORWARD_MS between two looks                           the calendar of before goes on, held
    held, and the calendar is right again, within FORWARD_MS                        believed
    held for HOLD_MS by the boot clock, or an operator says so                      believed

Where a calendar was wrong for a moment, messages that no group needs yet are still there
afterwards, and scheduled messages are delivered at their times.
"""

from __future__ import annotations

import logging

from ..protocol.clock import Clock

log = logging.getLogger("keylane.broker")

FORWARD_MS = 2 * 3_600_000
HOLD_MS = 24 * 3_600_000


class Calendar:
    """The calendar that ages and times are judged by, from the one that was right when this was
    made.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._held_at_ms: int | None = None
        """When it was set forward, by the boot clock."""
        self.believe()

    def believe(self) -> None:
        """Take the calendar for right as it is now."""
        self._take(self._clock.wall_ms(), self._clock.boot_ms())

    def _take(self, wall_ms: int, boot_ms: int) -> None:
        self._wall_ms, self._boot_ms = wall_ms, boot_ms
        self._held_at_ms = None

    def now_ms(self) -> int:
        """The time to judge by, in milliseconds since 1970; a look at the calendar, and to be taken
        at every check.
        """
        wall_ms, boot_ms = self._clock.wall_ms(), self._clock.boot_ms()
        judged_ms = self._judged_ms(wall_ms, boot_ms)
        if judged_ms == wall_ms:
            # What was judged, and not a reading of later: a calendar that is set in between would
            # be believed.
            self._take(wall_ms, boot_ms)
        elif self._held_at_ms is None:
            self._held_at_ms = boot_ms
            log.warning("%s", self.problem)
        return judged_ms

    def told_ms(self) -> int:
        """The time to judge by, as `now_ms`, but no look: nothing changes by it."""
        return self.both_ms()[0]

    def both_ms(self) -> tuple[int, int]:
        """The time as `told_ms`, and the one of the machine's calendar, which is later while it is
        not believed.
        """
        wall_ms = self._clock.wall_ms()
        return self._judged_ms(wall_ms, self._clock.boot_ms()), wall_ms

    def _judged_ms(self, wall_ms: int, boot_ms: int) -> int:
        """The time that counts; another one than `wall_ms` if the calendar is not believed."""
        expected_ms = self._wall_ms + boot_ms - self._boot_ms
        held_ms = 0 if self._held_at_ms is None else boot_ms - self._held_at_ms
        if wall_ms <= expected_ms + FORWARD_MS or held_ms >= HOLD_MS:
            return wall_ms
        return expected_ms

    @property
    def problem(self) -> str:
        """Why another time counts; "" if they are not.  As the last look found it."""
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
