"""Limits a reader to `bytes_per_second`: decides when its next read may begin, and its size. Pure.

    bytes received ──▶ debt ── falls by bytes_per_second ──▶ 0: the next read

Invariants
    In any period of N seconds the reader receives at most N times `bytes_per_second`, and one
    answer more.
"""

from __future__ import annotations

from ..protocol.limits import PULL_BYTES_MAX

ANSWER_BYTES_MIN = 64 << 10
"""The smallest number of bytes to request: many small answers cost more than an even pace is
worth.
"""
ANSWERS_PER_SECOND = 4
"""The number of answers per second at a low limit, for an even pace."""


class Pace:
    """Tracks a reader's debt; the caller passes the current time in seconds."""

    def __init__(self, bytes_per_second: int | None) -> None:
        assert bytes_per_second is None or bytes_per_second > 0
        self._bytes_per_second = bytes_per_second
        self._debt_ends_s = float("-inf")

    @property
    def bytes_max(self) -> int:
        """The number of bytes to request in one read."""
        if self._bytes_per_second is None:
            return PULL_BYTES_MAX
        bytes_per_answer = self._bytes_per_second // ANSWERS_PER_SECOND
        return max(ANSWER_BYTES_MIN, min(PULL_BYTES_MAX, bytes_per_answer))

    def wait_s(self, now_s: float) -> float:
        """Return the seconds until the next read may begin."""
        return max(0.0, self._debt_ends_s - now_s)

    def record_received(self, count: int, now_s: float) -> None:
        """Record that an answer of `count` bytes was received."""
        if self._bytes_per_second is not None:
            self._debt_ends_s = max(self._debt_ends_s, now_s) + count / self._bytes_per_second
