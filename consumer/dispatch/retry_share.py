"""Limits how many retries of a consumer run at the same time, and how much of the workers' time
they get. Pure.

    room ─▶ handed out: take ─▶ begin ─▶ end

Invariants
    Retries use at most 1/WORKERS_PER_TRY of the workers, but at least one. A retry that runs for
    longer than LONG_MS is no longer counted, so that others run beside it. While first attempts
    wait, retries get at most 1/TIME_DIVISOR of the workers' time, one at a time for every
    TIME_DIVISOR workers. Slow retries get more: the pause between two never exceeds PAUSE_MAX_MS.
"""

from __future__ import annotations

TIME_DIVISOR = 40
WORKERS_PER_TRY = 4
LONG_MS = 10_000
BURST_MS = 10
"""How much of their share retries may use in advance, so that no timer is needed between short
ones.
"""
PAUSE_MAX_MS = 30_000


class RetryShare:
    """The retries that run, by an id that the caller chooses; times are boot-clock milliseconds."""

    __slots__ = ("_concurrency", "_reserved_until_ms", "_started_ms")

    def __init__(self, concurrency: int) -> None:
        self._concurrency = concurrency
        self._started_ms: dict[int, int] = {}
        """The start of each retry; 0 before it starts."""
        self._reserved_until_ms = 0
        """The time until which workers are reserved for first attempts, to compensate for retries
        that ran.
        """

    def room(self, now_ms: int, *, first_attempts_wait: bool) -> int:
        """Return how many more retries may be handed out now."""
        if first_attempts_wait and now_ms < self._reserved_until_ms - BURST_MS:
            return 0
        return max(0, self._limit(first_attempts_wait) - self._count_active(now_ms))

    def next_ms(self, now_ms: int, *, first_attempts_wait: bool) -> int | None:
        """Return when there may be room without the end of a retry; None: not before one ends."""
        next_ms = now_ms
        if first_attempts_wait:
            next_ms = max(next_ms, self._reserved_until_ms - BURST_MS)
        if self._count_active(now_ms) >= self._limit(first_attempts_wait):
            started = [ms for ms in self._started_ms.values() if ms > max(0, now_ms - LONG_MS)]
            if not started:
                return None
            next_ms = max(next_ms, min(started) + LONG_MS)
        return next_ms

    def _limit(self, first_attempts_wait: bool) -> int:
        workers_per_retry = TIME_DIVISOR if first_attempts_wait else WORKERS_PER_TRY
        return max(1, self._concurrency // workers_per_retry)

    def _count_active(self, now_ms: int) -> int:
        return sum(not 0 < ms <= now_ms - LONG_MS for ms in self._started_ms.values())

    def take(self, retry_id: int) -> None:
        """Record that a retry was handed out."""
        self._started_ms[retry_id] = 0

    def begin(self, retry_id: int, now_ms: int) -> None:
        """Record that a worker has started a retry."""
        self._started_ms[retry_id] = now_ms

    def end(self, retry_id: int, now_ms: int) -> None:
        """Record that a retry has ended, or will not start."""
        started_ms = self._started_ms.pop(retry_id, 0)
        if started_ms:
            reserved_ms = (now_ms - started_ms) * TIME_DIVISOR // self._concurrency
            until_ms = max(self._reserved_until_ms, started_ms) + reserved_ms
            self._reserved_until_ms = min(until_ms, now_ms + PAUSE_MAX_MS)
