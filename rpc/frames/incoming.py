"""Limits a server's memory for incomplete incoming messages. Above the limit, the slowest senders
are dropped. Pure.

    up to bytes_max                 none is dropped
    up to HARD_FACTOR * bytes_max   messages that arrived more slowly than RATE_MIN are dropped
    above                           the slowest are dropped, whatever their rate

Invariants
    A message counts with the bytes that have arrived, not with the size that it announced.
    The time during which the server itself does not read is not counted against the sender.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable

BYTES_MAX = 256 << 20
HARD_FACTOR = 4
RATE_WINDOW_S = 2.0
"""The minimum time in seconds over which a rate is measured; the maximum is twice as long. A
younger message is only dropped if there is no older one.
"""
RATE_MIN = 8 << 10
"""The lowest accepted rate in bytes per second; at this rate, a batch of 128 KiB takes 16 s."""
CHECK_INTERVAL_S = 0.5
"""The time in seconds between two checks of all messages while they use more than `bytes_max`, but
less than the hard limit.
"""
HARD_SHARE = 7 / 8
"""When the hard limit is reached, messages are dropped until this share of it remains. A check
takes time for each connection, so each check must free a good part of the memory.
"""


class _UnfinishedMessage:
    """A message of which only a part has arrived. Its size is sampled at two times, to measure its
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
        """When the server stopped reading the connection; None while it reads."""
        self.drop_connection = drop_connection

    def rate(self, now_s: float) -> tuple[float, float]:
        """Return the time in seconds over which the rate was measured, and the rate in bytes per
        second.
        """
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
    """A server's memory budget for the unfinished messages of all its connections."""

    def __init__(self, bytes_max: int = BYTES_MAX) -> None:
        self.bytes_max = bytes_max
        self.used_bytes = 0
        self._unfinished: dict[Hashable, _UnfinishedMessage] = {}
        self._next_check_s = float("-inf")
        """When all messages are checked again, while they use more than `bytes_max`."""

    def record_progress(
        self, connection: Hashable, size: int, now_s: float, drop_connection: Callable[[], object]
    ) -> None:
        """
        Record that `size` bytes of a message have arrived so far, and drop slow messages while the
        total size is too large.

        Args:
            now_s: the time, from the same clock for all connections.
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
        """Record that the server has stopped reading a connection. Does nothing if the connection
        has no unfinished message.
        """
        message = self._unfinished.get(connection)
        if message is not None and message.paused_s is None:
            message.paused_s = now_s

    def resume(self, connection: Hashable, now_s: float) -> None:
        """Record that the server is reading a connection again."""
        message = self._unfinished.get(connection)
        if message is not None and message.paused_s is not None:
            message.start_s += now_s - message.paused_s
            message.sample_s += now_s - message.paused_s
            message.paused_s = None

    def release(self, connection: Hashable) -> None:
        """Forget the message of a connection because it is complete or dropped. Does nothing if
        there is none.
        """
        message = self._unfinished.pop(connection, None)
        if message is not None:
            self.used_bytes -= message.bytes

    def _drop_slowest(self, now_s: float, down_to_bytes: int, *, only_stuck: bool = False) -> None:
        """
        Drop messages, slowest first, until the rest use at most `down_to_bytes`.

        Args:
            only_stuck: only drop messages that are slower than RATE_MIN and old enough to tell.
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
