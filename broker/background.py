"""Limits how much of a broker the reads of jobs may take while live clients use it. Pure.

    no live request for LIVE_MS    jobs read as fast as the broker answers
    live requests                  answers are small, all jobs together read
                                   LIVE_BYTES_PER_SECOND, and live requests go first

A large answer occupies the event loop and the socket for milliseconds, and every live request after
it has to wait for it.

Invariants
    A job's read waits at most WAIT_MS_MAX, so it is answered long before its client gives up.
"""

from __future__ import annotations

LIVE_MS = 100
"""Time in milliseconds for which a request of a live client makes the reads of jobs yield."""
LIVE_BYTES_PER_SECOND = 64 << 20
LIVE_ANSWER_BYTES = 256 << 10
WAIT_MS_MAX = 1_000


class BackgroundBudget:
    """Decides when a job's read may begin and how large its answer is; clocks are passed in."""

    def __init__(self) -> None:
        self.live_at_ms = -1 - LIVE_MS
        """The time of the boot clock, in milliseconds, at which the last request of a live client
        arrived.
        """
        self._free_at_ms = 0.0

    def wait_ms(self, now_ms: int) -> float:
        """Return how long a job's read waits for its turn, in milliseconds; 0 means that its turn
        is now.
        """
        if now_ms > self.live_at_ms + LIVE_MS:
            return 0.0
        return min(max(0.0, self._free_at_ms - now_ms), WAIT_MS_MAX)

    def take(self, wanted_bytes: int, now_ms: int) -> int:
        """Take a turn, and return the number of bytes that the answer may have."""
        if now_ms > self.live_at_ms + LIVE_MS:
            return wanted_bytes
        bytes_max = min(wanted_bytes, LIVE_ANSWER_BYTES)
        cost_ms = bytes_max * 1_000 / LIVE_BYTES_PER_SECOND
        self._free_at_ms = min(max(self._free_at_ms, now_ms) + cost_ms, now_ms + WAIT_MS_MAX)
        return bytes_max
