"""How many messages a shared group's session pulls: one for each free worker, and as many as are
handled in a second. Pure.

Invariant
    Nothing is pulled that would wait here while another consumer may be free.
"""

from __future__ import annotations

SECOND_MS = 1_000


class PullSize:
    """The free workers of a consumer, and how fast it handles one partition's messages."""

    __slots__ = ("_finished", "_pulled_ms", "free", "received")

    def __init__(self) -> None:
        self.free = 0
        """How many messages free workers of the consumer can begin; negative: how many wait for a
        worker.
        """
        self.received = 0
        """How many messages were pulled."""
        self._pulled_ms = 0
        """When the last pull was sent."""
        self._finished = 0
        """How many messages had ended by then."""

    def decide(self, held: int, limit: int, now_ms: int, *, left: int = 0) -> int:
        """
        Return how many messages to pull now; 0: none.

        Args:
            held: how many messages have not ended.
            limit: how many there may be.
            left: how many of them a program has taken, and goes on without having acked them.
        """
        # A loop has no free workers, from which the number could grow: it doubles.
        since_ms = max(now_ms - self._pulled_ms, SECOND_MS // 2 if left else SECOND_MS)
        ahead = max(0, self.received - held + left - self._finished) * SECOND_MS // since_ms
        size = min(limit - held, self.free + ahead)
        is_worth_it = self.free > 0 or 0 < ahead // 2 <= size
        return max(0, size) if is_worth_it else 0

    def begin(self, held: int, now_ms: int, *, left: int = 0) -> None:
        """Record that a pull is sent."""
        self._pulled_ms = now_ms
        self._finished = self.received - held + left
