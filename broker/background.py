"""How much of a broker the reads of jobs may take while live clients use it.  Pure.

    no live request for LIVE_MS    jobs read as fast as the broker answers
    live requests                  small answers, LIVE_BYTES_PER_SECOND of all jobs together, live requests first

A large answer holds the event loop and the socket for milliseconds, which every live request behind
it then waits.

Invariants
    A job's read waits at most WAIT_MS_MAX, so that it is answered long before its client gives it
    up.
"""

from __future__ import annotations

LIVE_MS = 100
"""A live request counts for so long."""
LIVE_BYTES_PER_SECOND = 64 << 20
LIVE_ANSWER_BYTES = 256 << 10
WAIT_MS_MAX = 1_000


class BackgroundBudget:
    """Decides when a job's read may begin and how large its answer is; clocks are passed in."""

    def __init__(self) -> None:
        self.live_at_ms = -1 - LIVE_MS
        """When the last request of a live client came."""
        self._free_at_ms = 0.0

    def wait_ms(self, now_ms: int) -> float:
        """How long a job's read waits before its turn; 0: it may take it."""
        if now_ms > self.live_at_ms + LIVE_MS:
            return 0.0
        return min(max(0.0, self._free_at_ms - now_ms), WAIT_MS_MAX)

    def take(self, wanted_bytes: int, now_ms: int) -> int:
        """Take a turn; returns the bytes that the answer may have."""
        if now_ms > self.live_at_ms + LIVE_MS:
            return wanted_bytes
        bytes_max = min(wanted_bytes, LIVE_ANSWER_BYTES)
        cost_ms = bytes_max * 1_000 / LIVE_BYTES_PER_SECOND
        self._free_at_ms = min(max(self._free_at_ms, now_ms) + cost_ms, now_ms + WAIT_MS_MAX)
        return bytes_max
