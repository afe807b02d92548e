"""A clock that stands still until a test advances it."""

from __future__ import annotations


class ManualClock:
    """
    See `keylane.protocol.clock.Clock`.

    Args:
        now_ms: the boot clock at first.
        calendar: False makes a look at the calendar an error.

    Attributes:
        wall_offset_ms: the calendar is ahead of the boot clock by this.
    """

    def __init__(self, now_ms: int = 1_000_000, *, calendar: bool = True) -> None:
        self.now_ms = now_ms
        self.calendar = calendar
        self.wall_offset_ms = 1_700_000_000_000

    def advance(self, ms: int) -> None:
        self.now_ms += ms

    def boot_ns(self) -> int:
        return self.now_ms * 1_000_000

    def boot_ms(self) -> int:
        return self.now_ms

    def wall_ms(self) -> int:
        assert self.calendar, "nothing here may look at the calendar"
        return self.now_ms + self.wall_offset_ms

    def wall_ns(self) -> int:
        return self.wall_ms() * 1_000_000
