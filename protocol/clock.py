"""The only access to the machine's clocks.

`boot` counts the time since the machine started, including suspend. It never jumps; deadlines and
ttls use it.
`wall` is the calendar, for people and for the times of messages. Correctness never depends on it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial
from itertools import repeat, starmap
from typing import Protocol


class Clock(Protocol):
    """The boot clock and the calendar, in whole milliseconds or nanoseconds."""

    def boot_ns(self) -> int:
        """Return the nanoseconds since the machine started, including suspend."""
        ...

    def boot_ms(self) -> int:
        """Return the milliseconds since the machine started, including suspend."""
        ...

    def wall_ms(self) -> int:
        """Return the milliseconds since 1970."""
        ...

    def wall_ns(self) -> int:
        """Return the nanoseconds since 1970."""
        ...


class SystemClock:
    """The machine's clocks."""

    # Bound to the C functions directly: a consumer reads the boot clock before every message.
    boot_ns = staticmethod(partial(time.clock_gettime_ns, time.CLOCK_BOOTTIME))
    wall_ns = staticmethod(time.time_ns)

    @staticmethod
    def boot_ms() -> int:
        """Return the milliseconds since the machine started, including suspend."""
        return time.clock_gettime_ns(time.CLOCK_BOOTTIME) // 1_000_000

    @staticmethod
    def wall_ms() -> int:
        """Return the milliseconds since 1970."""
        return time.time_ns() // 1_000_000


def boot_seconds(clock: Clock) -> Iterator[float]:
    """Yield the boot clock in seconds, read again for each item; in a loop this is a third cheaper
    than `boot_ns`.
    """
    if type(clock) is SystemClock:
        return starmap(time.clock_gettime, repeat((time.CLOCK_BOOTTIME,)))
    return (clock.boot_ns() / 1e9 for _ in repeat(None))


def deadline_seconds(deadline_ns: int) -> float:
    """Return a deadline for `boot_seconds`, a microsecond early because seconds are rounded."""
    return (deadline_ns - 1_000) / 1e9


TICK_S = 0.25
TICKED_S_MIN = 2.0
"""A shorter wait is not aligned: it ends at its own time."""


def at_a_tick(wait_s: float, now_s: float) -> float:
    """
    Return when a wait of `wait_s` ends, by the clock that reads `now_s`: up to TICK_S early, at a
    multiple of TICK_S.

    Thus the waits of hundreds of idle consumers end together, and one wake-up of the process serves
    many.
    many.
    """
    end_s = now_s + wait_s
    return end_s - end_s % TICK_S if wait_s >= TICKED_S_MIN else end_s
