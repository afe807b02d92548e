"""Decides when the next read of a reader with `bytes_per_second` may begin, and its size. Pure.

    bytes received ──▶ debt ── falls by bytes_per_second ──▶ 0: the next read

Invariants
    In any period the reader receives at most `bytes_per_second` times its seconds, and one answer.
"""

from __future__ import annotations

from ..protocol.limits import PULL_BYTES_MAX

ANSWER_BYTES_MIN = 64 << 10
"""Smallest size in bytes of a request: the cost of many small answers outweighs an even pace."""
ANSWERS_PER_SECOND = 4
"""Number of answers a second at a slow pace, which keeps it even."""


class Pace:
    """The debt of a reader; the caller passes the present time in seconds."""

    def __init__(self, bytes_per_second: int | None) -> None:
        assert bytes_per_second is None or bytes_per_second > 0
        self._bytes_per_second = bytes_per_second
        self._free_at_s = float("-inf")

    @property
    def bytes_max(self) -> int:
        """The number of bytes to request in one read."""
        if self._bytes_per_second is None:
            return PULL_BYTES_MAX
        even = self._bytes_per_second // ANSWERS_PER_SECOND
        return max(ANSWER_BYTES_MIN, min(PULL_BYTES_MAX, even))

    def wait_s(self, now_s: float) -> float:
        """Return the seconds until the next read may begin."""
        return max(0.0, self._free_at_s - now_s)

    def received(self, count: int, now_s: float) -> None:
        """Note an answer of `count` bytes."""
        if self._bytes_per_second is not None:
            self._free_at_s = max(self._free_at_s, now_s) + count / self._bytes_per_second
