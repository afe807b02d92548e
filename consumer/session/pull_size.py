"""How many messages a shared group's session pulls: one for each free worker, and as many as are
handled in a second. Pure.

Invariant
    Nothing is pulled that would wait here while another consumer may be free.
"""

from __future__ import annotations

SECOND_MS = 1_000


class PullSize:
    """
    The free workers of a consumer, and how fast it handles one partition's messages.

    Args:
        by_hand: True if a program takes messages, which counts as handling them: it may ack many of
            them later, at once.
    """

    __slots__ = ("_by_hand", "_finished", "_rate", "_since_ms", "free", "received")

    def __init__(self, *, by_hand: bool = False) -> None:
        self._by_hand = by_hand
        self.free = 0
        """How many messages free workers of the consumer can begin; negative: how many wait for a
        worker.
        """
        self.received = 0
        """How many messages were pulled."""
        self._since_ms = 0
        """When the present second began."""
        self._finished = 0
        """How many messages were handled by then."""
        self._rate = 0
        """How many messages were handled in the second before."""

    def decide(self, held: int, in_hand: int, limit: int, now_ms: int) -> int:
        """
        Return how many messages to pull now; 0: none.

        Args:
            held: how many messages have not ended.
            in_hand: how many of them workers or the program have.
            limit: how many may be held.
        """
        finished = self.received - held + (in_hand if self._by_hand else 0)
        elapsed_ms = now_ms - self._since_ms
        if elapsed_ms >= SECOND_MS:
            self._rate = max(0, finished - self._finished) * SECOND_MS // elapsed_ms
            self._since_ms, self._finished = now_ms, finished
        ahead = max(self._rate, finished - self._finished)
        size = min(limit - held, self.free + ahead)
        is_worth_it = self.free > 0 or 0 < ahead // 2 <= size
        return max(0, size) if is_worth_it else 0
