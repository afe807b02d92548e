"""Measures how many messages and bytes a second each partition stores. Pure.

    a window of WINDOW_MS ends ─▶ it becomes the previous one, and that is forgotten

A rate is the average over the current window and the previous one, so it is at most twice WINDOW_MS
old. Only partitions that stored something in these windows take memory.
"""

from __future__ import annotations

from typing import NamedTuple

WINDOW_MS = 30_000
SPAN_MS_MIN = 1_000
"""The time over which a rate is taken at least, although the broker may have started later."""


class Rate(NamedTuple):
    """What a partition stores in a second."""

    messages_per_s: float
    bytes_per_s: float


class Rates:
    """The rates of a broker's partitions. Times are in milliseconds since boot."""

    def __init__(self, now_ms: int) -> None:
        self._began_ms = now_ms
        self._current: dict[int, list[int]] = {}
        """Maps partition ids to the messages and the bytes that the current window has counted."""
        self._previous: dict[int, list[int]] = {}
        self._previous_ms = 0
        """The length of the previous window; 0 if there is none."""

    def count(self, partition_id: int, *, messages: int, size_bytes: int, now_ms: int) -> None:
        """Count a durable batch."""
        if now_ms - self._began_ms >= WINDOW_MS:
            self._end_window(now_ms)
        counts = self._current.get(partition_id)
        if counts is None:
            self._current[partition_id] = [messages, size_bytes]
        else:
            counts[0] += messages
            counts[1] += size_bytes

    def rate(self, partition_id: int, now_ms: int) -> Rate:
        """Return the rate of a partition."""
        if now_ms - self._began_ms >= WINDOW_MS:
            self._end_window(now_ms)
        span_s = max(now_ms - self._began_ms + self._previous_ms, SPAN_MS_MIN) / 1000
        messages, size_bytes = self._current.get(partition_id, (0, 0))
        earlier_messages, earlier_bytes = self._previous.get(partition_id, (0, 0))
        return Rate(
            round((messages + earlier_messages) / span_s, 3),
            round((size_bytes + earlier_bytes) / span_s, 3),
        )

    def storing_ids(self) -> list[int]:
        """Return the sorted ids of the partitions whose rate may be above 0."""
        return sorted(self._current.keys() | self._previous.keys())

    def _end_window(self, now_ms: int) -> None:
        """Begin a new window. Nothing was counted since the old one has reached WINDOW_MS."""
        length_ms = now_ms - self._began_ms
        is_recent = length_ms < 2 * WINDOW_MS
        self._previous = self._current if is_recent else {}
        self._previous_ms = length_ms if is_recent else WINDOW_MS
        self._current = {}
        self._began_ms = now_ms
