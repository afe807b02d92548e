"""Decides whether a consumer group is stuck. Pure."""

from __future__ import annotations

STUCK_MS = 10_000
"""How long the oldest message of a stuck group has waited at least, in milliseconds."""


def is_stuck(lag: float, *, falls_per_s: float, oldest_ms: float) -> bool:
    """
    Return True if a lag is a problem. A group that works through a batch is not stuck, nor is one
    that is only a moment behind.

    Args:
        lag: the number of messages that are not acked.
        falls_per_s: how fast the lag falls, in messages per second; below 0 it grows.
        oldest_ms: how long the oldest of these messages has waited at least, in milliseconds.
    """
    return lag > 0 and falls_per_s <= 0 and oldest_ms >= STUCK_MS
