"""What a client hears of its quotas: waits that servers tell it, counted and logged."""

from __future__ import annotations

import logging
from collections.abc import Callable

from ...protocol.clock import SystemClock
from ...protocol.log_filter import LogFilter

log = logging.getLogger("keylane.rpc")

THROTTLED_HEADER = "Keylane-Throttled-Ms"
"""For how long a call over HTTP has waited for its caller's quota."""


class Throttling:
    """The waits of one client."""

    def __init__(self, boot_ms: Callable[[], int] | None = None) -> None:
        self._boot_ms = boot_ms or SystemClock().boot_ms
        self.waited_ms = 0
        """Told by servers; waits of several connections at a time count together."""
        self._lines = LogFilter()

    def note(self, address: str, wait_ms: int, limit: str) -> None:
        """Count a wait, and log it if no line about its limit was logged lately."""
        self.waited_ms += max(0, wait_ms)
        if self._lines.met(limit, self._boot_ms()):
            log.warning(
                "%s makes this client wait for %d ms: the limit of %.200s is used up; "
                "the client has waited for %d ms in all",
                address,
                wait_ms,
                limit,
                self.waited_ms,
            )
