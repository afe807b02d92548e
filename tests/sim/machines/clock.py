"""A clock that stands still until a test advances it."""

from __future__ import annotations


class ManualClock:
    """See `keylane.protocol.clock.Clock`; `wall_offset_ms` is how far the calendar is off."""

    def __init__(self, now_ms: int = 1_000_000) -> None:
        self.now_ms = now_ms
        self.wall_offset_ms = 1_700_000_000_000

    def advance(self, ms: int) -> None:
        self.now_ms += ms

    def boot_ms(self) -> int:
        return self.now_ms

    def wall_ms(self) -> int:
        return self.now_ms + self.wall_offset_ms

    def wall_ns(self) -> int:
        return self.wall_ms() * 1_000_000
