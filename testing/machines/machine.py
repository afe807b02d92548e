"""A simulated machine with clocks that go wrong, which may be up or down."""

from __future__ import annotations

from .loop import SimLoop


class Machine:
    """
    `rate` is the speed of its clocks: 1.05 gains five seconds in a hundred. The boot clock jumps
    only at a boot; the calendar jumps by `wall_jump_ms`.
    """

    def __init__(self, loop: SimLoop, name: str, *, rate: float, boot_s: float) -> None:
        self.name = name
        self.rate = rate
        self.up = True
        self.boots = 1
        self.wall_jump_ms = 0
        self.loop = loop
        self._boot_ns = int(boot_s * 1e9)
        self._zero = 0.0

    def boot_ns(self) -> int:
        """Return the nanoseconds since it started."""
        return self._boot_ns + int((self.loop.now - self._zero) * self.rate * 1e9)

    def boot_ms(self) -> int:
        """Return the milliseconds since it started."""
        return self.boot_ns() // 1_000_000

    def wall_ms(self) -> int:
        """Return the milliseconds since 1970, by its calendar."""
        return 1_700_000_000_000 + self.wall_jump_ms + int(self.loop.now * self.rate * 1000)

    def wall_ns(self) -> int:
        """Return the nanoseconds since 1970, by its calendar."""
        return self.wall_ms() * 1_000_000

    def reboot(self, boot_s: float) -> None:
        """Start the boot clock again."""
        self.boots += 1
        self._zero = self.loop.now
        self._boot_ns = int(boot_s * 1e9)
