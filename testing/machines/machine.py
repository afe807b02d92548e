"""A simulated machine with inaccurate clocks, which may be up or down, and a simulated SIGTERM,
which lets `Consumer.run` wait for a signal without using real ones.
"""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Self

from .loop import PROCESS, Process, SimLoop


class Machine:
    """
    A simulated machine. `rate` is the speed of its clocks: 1.05 gains five seconds in a hundred.
    The boot clock only jumps when the machine boots; the wall clock jumps by `wall_jump_ms`.
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
        """Return the time since the machine booted, in nanoseconds."""
        return self._boot_ns + int((self.loop.now - self._zero) * self.rate * 1e9)

    def boot_ms(self) -> int:
        """Return the time since the machine booted, in milliseconds."""
        return self.boot_ns() // 1_000_000

    def wall_ms(self) -> int:
        """Return the time in milliseconds since 1970, according to the machine's wall clock."""
        return 1_700_000_000_000 + self.wall_jump_ms + int(self.loop.now * self.rate * 1000)

    def wall_ns(self) -> int:
        """Return the time in nanoseconds since 1970, according to the machine's wall clock."""
        return self.wall_ms() * 1_000_000

    def reboot(self, boot_s: float) -> None:
        """Restart the boot clock at `boot_s` seconds."""
        self.boots += 1
        self._zero = self.loop.now
        self._boot_ns = int(boot_s * 1e9)


class SimStopSignals:
    """Replaces `keylane.rpc.stop_signals.StopSignals` in the process that creates it."""

    def __init__(self) -> None:
        self.event = asyncio.Event()
        self._process = PROCESS.get()

    def __enter__(self) -> Self:
        self._process.on_stop[self.event.set] = None
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        del self._process.on_stop[self.event.set]


def send_stop(process: Process) -> bool:
    """Send SIGTERM to a process. Return False if the process has no handler, so that the caller
    must end it.
    """
    listeners = list(process.on_stop)
    for stop in listeners:
        stop()
    return bool(listeners)
