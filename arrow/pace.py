"""Limits a reader to `bytes_per_second`: decides when its next read may start, and how large it may
be. Pure.

    bytes received ──▶ debt ── falls by bytes_per_second ──▶ 0: the next read

Invariants
    In any period of N seconds, the reader receives at most N times `bytes_per_second`, plus one
    answer.
"""

from __future__ import annotations

from ..protocol.limits import PULL_BYTES_MAX

ANSWER_BYTES_MIN = 64 << 10
"""The smallest number of bytes to request. Smaller answers would cost more than an even pace is
worth.
"""
ANSWERS_PER_SECOND = 4
"""The number of answers per second when the limit is low, which keeps the pace even."""


class Pace:
    """Tracks a reader's debt. The caller passes the current time in seconds."""

    def __init__(self, bytes_per_second: int | None) -> None:
        assert bytes_per_second is None or bytes_per_second > 0
        self._bytes_per_second = bytes_per_second
        self._debt_ends_s = float("-inf")

    @property
    def bytes_max(self) -> int:
        """The number of bytes to request in the next read."""
        if self._bytes_per_second is None:
            return PULL_BYTES_MAX
        bytes_per_answer = self._bytes_per_second // ANSWERS_PER_SECOND
        return max(ANSWER_BYTES_MIN, min(PULL_BYTES_MAX, bytes_per_answer))

    def wait_s(self, now_s: float) -> float:
        """Return how many seconds to wait before the next read."""
        return max(0.0, self._debt_ends_s - now_s)

    def record_received(self, count: int, now_s: float) -> None:
        """Record that an answer of `count` bytes has been received."""
        if self._bytes_per_second is not None:
            self._debt_ends_s = max(self._debt_ends_s, now_s) + count / self._bytes_per_second
