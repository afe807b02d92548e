"""Limits the bandwidth of batch jobs' reads while live clients use the broker. Pure.

    no live request for LIVE_MS    jobs read as fast as the broker answers
    live requests                  answers are small, all jobs together read
                                   LIVE_BYTES_PER_SECOND, and live requests go first

A large answer occupies the event loop and the socket for milliseconds, which delays every live
request behind it.

Invariants
    A job's read waits at most WAIT_MS_MAX, which is well below the client's timeout.
"""

from __future__ import annotations

LIVE_MS = 100
"""How long the reads of jobs are throttled after a request from a live client, in milliseconds."""
LIVE_BYTES_PER_SECOND = 64 << 20
LIVE_ANSWER_BYTES = 256 << 10
WAIT_MS_MAX = 1_000


class BackgroundBudget:
    """Decides when a job's read may begin, and how large its answer may be."""

    def __init__(self) -> None:
        self.last_live_at_ms = -1 - LIVE_MS
        """When the last request from a live client arrived, in milliseconds since boot."""
        self._next_read_at_ms = 0.0

    def wait_ms(self, now_ms: int) -> float:
        """Return how long a job's read must wait, in milliseconds; 0 if it may begin now."""
        if now_ms > self.last_live_at_ms + LIVE_MS:
            return 0.0
        return min(max(0.0, self._next_read_at_ms - now_ms), WAIT_MS_MAX)

    def reserve(self, wanted_bytes: int, now_ms: int) -> int:
        """Reserve bandwidth for an answer, and return the maximum size of the answer in bytes."""
        if now_ms > self.last_live_at_ms + LIVE_MS:
            return wanted_bytes
        bytes_max = min(wanted_bytes, LIVE_ANSWER_BYTES)
        cost_ms = bytes_max * 1_000 / LIVE_BYTES_PER_SECOND
        next_read_at_ms = max(self._next_read_at_ms, now_ms) + cost_ms
        self._next_read_at_ms = min(next_read_at_ms, now_ms + WAIT_MS_MAX)
        return bytes_max
