"""Counts and logs how long servers make a client wait because of quotas."""

from __future__ import annotations

import logging
from collections.abc import Callable

from ...protocol.clock import SystemClock
from ...protocol.log_filter import LogFilter

log = logging.getLogger("keylane.rpc")

THROTTLED_HEADER = "Keylane-Throttled-Ms"
"""HTTP response header: the time in milliseconds that the call waited for its caller's quota."""


class Throttling:
    """Counts the waits of one client."""

    def __init__(self, boot_ms: Callable[[], int] | None = None) -> None:
        self._boot_ms = boot_ms or SystemClock().boot_ms
        self.waited_ms = 0
        """The total waiting time in milliseconds that servers have reported; waits of concurrent
        calls add up.
        """
        self._log_filter = LogFilter()

    def record(self, address: str, wait_ms: int, limit: str) -> None:
        """Count a wait, and log it unless a wait for the same limit was logged recently."""
        self.waited_ms += max(0, wait_ms)
        if self._log_filter.count_failure(limit, self._boot_ms()):
            log.warning(
                "%s makes this client wait for %d ms because the limit of %.200s is used up; "
                "the client has waited for %d ms in total",
                address,
                wait_ms,
                limit,
                self.waited_ms,
            )
