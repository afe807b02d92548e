"""Limits a server's memory for incoming messages that are not complete: above the limit, the
slowest senders are dropped. Pure.

    up to bytes_max                 none is dropped
    up to HARD_FACTOR * bytes_max   messages that arrived more slowly than RATE_MIN are dropped
    above                           the slowest are dropped, whatever their rate

Invariants
    A message counts with the bytes that have arrived, not with its announced size.
    Time for which the server itself does not read a connection is not counted against the sender.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable

BYTES_MAX = 256 << 20
HARD_FACTOR = 4
RATE_WINDOW_S = 2.0
"""Seconds over which a rate is measured: the last RATE_WINDOW_S, and up to twice that. A younger
message is dropped only if there is no older one.
"""
RATE_MIN = 8 << 10
"""The lowest accepted rate, in bytes per second: a batch of 128 KiB would take 16 s."""
CHECK_INTERVAL_S = 0.5
"""Seconds between two checks of all messages while they hold more than `bytes_max`, but less than
the hard limit.
"""
HARD_SHARE = 7 / 8
"""When the hard limit is reached, messages are dropped down to this share of it: a check takes time
for each connection, so each must free a good part of the memory.
"""


class _UnfinishedMessage:
    """A message of which only a part has arrived; it samples its size at two times, for its
    rate.
    """

    __slots__ = (
        "bytes",
        "drop_connection",
        "start_bytes",
        "start_s",
        "sample_bytes",
        "sample_s",
        "paused_s",
    )

    def __init__(self, now_s: float, drop_connection: Callable[[], object]) -> None:
        self.bytes = self.start_bytes = self.sample_bytes = 0
        self.start_s = self.sample_s = now_s
        self.paused_s: float | None = None
        """The time since which the server has not read its connection; None while it reads."""
        self.drop_connection = drop_connection

    def rate(self, now_s: float) -> tuple[float, float]:
        """Return the seconds over which the rate was measured, and the rate in bytes per second."""
        if self.paused_s is not None:
            now_s = self.paused_s
        if now_s - self.sample_s >= RATE_WINDOW_S:
            self.start_s = self.sample_s
            self.start_bytes = self.sample_bytes
            self.sample_s = now_s
            self.sample_bytes = self.bytes
        measured_s = now_s - self.start_s
        return measured_s, (self.bytes - self.start_bytes) / max(measured_s, 0.001)


class IncomingBudget:
    """The memory budget for unfinished messages of all connections of a server."""

    def __init__(self, bytes_max: int = BYTES_MAX) -> None:
        self.bytes_max = bytes_max
        self.used_bytes = 0
        self._unfinished: dict[Hashable, _UnfinishedMessage] = {}
        self._next_check_s = float("-inf")
        """The time from which all messages are checked again, while they hold more than
        `bytes_max`.
        """

    def record_progress(
        self, connection: Hashable, size: int, now_s: float, drop_connection: Callable[[], object]
    ) -> None:
        """
        Record that `size` bytes of a message have arrived so far, and drop slow messages while all
        together are too large.

        Args:
            now_s: the time, by one clock for all connections.
            drop_connection: closes the connection, which calls `release`.
        """
        message = self._unfinished.get(connection)
        if message is None:
            message = self._unfinished[connection] = _UnfinishedMessage(now_s, drop_connection)
        self.used_bytes += size - message.bytes
        message.bytes = size
        if self.used_bytes <= self.bytes_max:
            return
        hard_bytes = HARD_FACTOR * self.bytes_max
        if self.used_bytes > hard_bytes:
            self._drop_slowest(now_s, int(hard_bytes * HARD_SHARE))
        elif now_s >= self._next_check_s:
            self._next_check_s = now_s + CHECK_INTERVAL_S
            self._drop_slowest(now_s, self.bytes_max, only_stuck=True)

    def pause(self, connection: Hashable, now_s: float) -> None:
        """Record that the server has stopped reading a connection; this does nothing if there is no
        unfinished message.
        """
        message = self._unfinished.get(connection)
        if message is not None and message.paused_s is None:
            message.paused_s = now_s

    def resume(self, connection: Hashable, now_s: float) -> None:
        """Record that the server reads a connection again."""
        message = self._unfinished.get(connection)
        if message is not None and message.paused_s is not None:
            message.start_s += now_s - message.paused_s
            message.sample_s += now_s - message.paused_s
            message.paused_s = None

    def release(self, connection: Hashable) -> None:
        """Forget a connection's message, because it is complete or dropped; this does nothing if
        there is none.
        """
        message = self._unfinished.pop(connection, None)
        if message is not None:
            self.used_bytes -= message.bytes

    def _drop_slowest(self, now_s: float, down_to_bytes: int, *, only_stuck: bool = False) -> None:
        """
        Drop messages, the slowest first, until the others hold at most `down_to_bytes`.

        Args:
            only_stuck: drop only messages that are old enough to be judged, and below RATE_MIN.
        """
        candidates = []
        for connection, message in self._unfinished.items():
            measured_s, rate = message.rate(now_s)
            is_young = measured_s < RATE_WINDOW_S
            if not only_stuck or (rate < RATE_MIN and not is_young):
                candidates.append((is_young, rate, connection, message.drop_connection))
        candidates.sort(key=lambda candidate: candidate[:2])
        for _, _, connection, drop_connection in candidates:
            if self.used_bytes <= down_to_bytes:
                return
            self.release(connection)
            drop_connection()
