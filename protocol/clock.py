"""What time it is: the only door to the machine's clocks.

`boot` counts time since the machine started, suspend included, and never jumps: deadlines and ttls use it.
`wall` is the calendar, for people and message stamps: nothing correct rests on it.
"""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Two clocks, in whole milliseconds or nanoseconds."""

    def boot_ms(self) -> int:
        """Milliseconds since the machine started, counting suspend."""
        ...

    def wall_ms(self) -> int:
        """Milliseconds since 1970."""
        ...

    def wall_ns(self) -> int:
        """Nanoseconds since 1970."""
        ...


class SystemClock:
    """The machine's clocks."""

    wall_ns = staticmethod(time.time_ns)

    @staticmethod
    def boot_ms() -> int:
        """Milliseconds since the machine started, counting suspend."""
        return time.clock_gettime_ns(time.CLOCK_BOOTTIME) // 1_000_000

    @staticmethod
    def wall_ms() -> int:
        """Milliseconds since 1970."""
        return time.time_ns() // 1_000_000
