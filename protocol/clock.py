"""The only access to the machine's clocks.

`boot` counts time since the machine started, suspend included.  It never jumps; deadlines and ttls
use it. `wall` is the calendar, for people and for the times of messages.  Correctness never depends
on it.
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
        """Nanoseconds since the machine started, counting suspend."""
        ...

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

    # Bound to the C functions directly: a consumer reads the boot clock before every message.
    boot_ns = staticmethod(partial(time.clock_gettime_ns, time.CLOCK_BOOTTIME))
    wall_ns = staticmethod(time.time_ns)

    @staticmethod
    def boot_ms() -> int:
        """Milliseconds since the machine started, counting suspend."""
        return time.clock_gettime_ns(time.CLOCK_BOOTTIME) // 1_000_000

    @staticmethod
    def wall_ms() -> int:
        """Milliseconds since 1970."""
        return time.time_ns() // 1_000_000


def boot_seconds(clock: Clock) -> Iterator[float]:
    """The boot clock in seconds, read anew for each item: in a loop a third cheaper than
    `boot_ns`.
    """
    if type(clock) is SystemClock:
        return starmap(time.clock_gettime, repeat((time.CLOCK_BOOTTIME,)))
    return (clock.boot_ns() / 1e9 for _ in repeat(None))


def deadline_seconds(deadline_ns: int) -> float:
    """A deadline for `boot_seconds`: a microsecond early, because seconds are rounded."""
    return (deadline_ns - 1_000) / 1e9


TICK_S = 0.25
TICKED_S_MIN = 2.0
"""A shorter wait ends at its own time."""


def at_a_tick(wait_s: float, now_s: float) -> float:
    """
    When a wait of `wait_s` ends by the clock that says `now_s`: up to TICK_S early, at a multiple
    of it.

    So the waits of hundreds of idle consumers end together, and one wake-up of each process serves
    many.
    """
    end_s = now_s + wait_s
    return end_s - end_s % TICK_S if wait_s >= TICKED_S_MIN else end_s
