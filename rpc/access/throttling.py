"""What a client hears of its quotas: waits that servers tell it, counted and logged."""

from __future__ import annotations

import logging
from collections.abc import Callable

from ...protocol.clock import SystemClock

log = logging.getLogger("keylane.rpc")

THROTTLED_HEADER = "Keylane-Throttled-Ms"
"""For how long a call over HTTP has waited for its caller's quota."""
LOG_AGAIN_MS = 10_000


class Throttling:
    """The waits of one client."""

    def __init__(self, boot_ms: Callable[[], int] | None = None) -> None:
        self._boot_ms = boot_ms or SystemClock().boot_ms
        self.waited_ms = 0
        """Told by servers; waits of several connections at a time count together."""
        self._logged_at_ms: int | None = None

    def note(self, address: str, wait_ms: int, limit: str) -> None:
        """Count a wait; it is logged at most each LOG_AGAIN_MS."""
        self.waited_ms += max(0, wait_ms)
        now_ms = self._boot_ms()
        if self._logged_at_ms is None or now_ms - self._logged_at_ms >= LOG_AGAIN_MS:
            self._logged_at_ms = now_ms
            log.warning(
                "%s makes this client wait for %d ms: the limit of %.200s is used up",
                address,
                wait_ms,
                limit,
            )
