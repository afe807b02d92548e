"""Protects a broker against a wall clock that jumps forward: the jump does not make anything old or
due until HOLD_MS have passed.

    agrees with the boot clock, is set back, or is set forward a little    trusted
    is set forward by more than FORWARD_MS between two checks               held: the earlier
                                                                           time continues
    is held, and right again within FORWARD_MS                             trusted
    is held for HOLD_MS by the boot clock, or an operator confirms it      trusted

If the clock is wrong only briefly, no messages are removed early, and scheduled messages are
delivered on time.
"""

from __future__ import annotations

import logging

from ..protocol.clock import Clock

log = logging.getLogger("keylane.broker")

FORWARD_MS = 2 * 3_600_000
HOLD_MS = 24 * 3_600_000


class WallClock:
    """The clock for ages and delivery times. It trusts the machine's wall clock at first, so that
    clock must be right when this object is created.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._distrusted_at_ms: int | None = None
        """When the wall clock was found to be set forward, in milliseconds since boot; None if it
        is trusted.
        """
        self.trust_now()

    def trust_now(self) -> None:
        """Trust the wall clock from now on."""
        self._trust(self._clock.wall_ms(), self._clock.boot_ms())

    def _trust(self, wall_ms: int, boot_ms: int) -> None:
        self._wall_ms = wall_ms
        self._boot_ms = boot_ms
        self._distrusted_at_ms = None

    def now_ms(self) -> int:
        """Check the wall clock, and return the trusted time in milliseconds since 1970. Decisions
        about ages and due times must use this method.
        """
        wall_ms, boot_ms = self._clock.wall_ms(), self._clock.boot_ms()
        trusted_ms = self._trusted_ms(wall_ms, boot_ms)
        if trusted_ms == wall_ms:
            # Keep the reading that was checked: a second reading could trust a clock that was set
            # in between.
            self._trust(wall_ms, boot_ms)
        elif self._distrusted_at_ms is None:
            self._distrusted_at_ms = boot_ms
            log.warning("%s", self.problem)
        return trusted_ms

    def reported_ms(self) -> int:
        """Return the trusted time like `now_ms`, but without changing any state."""
        return self.trusted_and_wall_ms()[0]

    def trusted_and_wall_ms(self) -> tuple[int, int]:
        """Return the trusted time and the machine's time, which is later than the former while it
        is not trusted. Both are in milliseconds since 1970.
        """
        wall_ms = self._clock.wall_ms()
        return self._trusted_ms(wall_ms, self._clock.boot_ms()), wall_ms

    def _trusted_ms(self, wall_ms: int, boot_ms: int) -> int:
        """Return `wall_ms` if the wall clock is trusted, otherwise the time that it should show."""
        expected_ms = self._wall_ms + boot_ms - self._boot_ms
        distrusted_ms = 0 if self._distrusted_at_ms is None else boot_ms - self._distrusted_at_ms
        if wall_ms <= expected_ms + FORWARD_MS or distrusted_ms >= HOLD_MS:
            return wall_ms
        return expected_ms

    @property
    def problem(self) -> str:
        """The reason why the wall clock is not trusted, as of the last `now_ms`; "" if it is
        trusted.
        """
        if self._distrusted_at_ms is None:
            return ""
        boot_ms = self._clock.boot_ms()
        forward_ms = self._clock.wall_ms() - self._wall_ms - (boot_ms - self._boot_ms)
        remaining_ms = max(self._distrusted_at_ms + HOLD_MS - boot_ms, 0)
        return (
            f"the calendar was set forward by {forward_ms / 3_600_000:.1f} hours: for "
            f"{remaining_ms / 3_600_000:.1f} more hours "
            "ages, and times of scheduled messages, are counted as if it was not; set it right, or "
            "send the broker SIGHUP if it is"
        )
