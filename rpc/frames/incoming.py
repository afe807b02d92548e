"""Limits the memory of all unfinished incoming messages at a server: over a limit, the slowest are
given up. Pure.

    below bytes_max           all continue
    up to HARD_FACTOR of it   those slower than RATE_MIN over the last seconds are given up
    above                     the slowest are given up, whatever their rate

Invariants
    A message counts with the bytes of it that have arrived.
    While the server itself does not read a connection, its message grows no older.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable

BYTES_MAX = 256 << 20
HARD_FACTOR = 4
PATIENCE_S = 2.0
"""The period, in seconds, of a rate: it covers the last PATIENCE_S to twice that. A younger message
is given up only if there is no older one.
"""
RATE_MIN = 8 << 10
"""The lowest accepted rate, in bytes a second: a batch of 128 KiB would take 16 s."""
LOOK_S = 0.5
"""Seconds between two checks of all messages while they hold more than `bytes_max`, and less than
HARD_FACTOR of it.
"""
HARD_SHARE = 7 / 8
"""The share of the hard limit that is left once it was reached: a check costs time for each
connection, so it has to free some memory.
"""


class _BegunMessage:
    """A message that has begun: its bytes, and its number of bytes at two moments, for its rate."""

    __slots__ = ("bytes", "from_bytes", "from_s", "give_up", "later_bytes", "later_s", "paused_s")

    def __init__(self, now_s: float, give_up: Callable[[], object]) -> None:
        self.bytes = self.from_bytes = self.later_bytes = 0
        self.from_s = self.later_s = now_s
        self.paused_s: float | None = None
        """The time since which the server has not read its connection; None while it reads."""
        self.give_up = give_up

    def seen(self, now_s: float) -> tuple[float, float]:
        """Return the period in seconds for which its rate is known, and the rate in bytes a
        second.
        """
        if self.paused_s is not None:
            now_s = self.paused_s
        if now_s - self.later_s >= PATIENCE_S:
            self.from_s = self.later_s
            self.from_bytes = self.later_bytes
            self.later_s = now_s
            self.later_bytes = self.bytes
        known_s = now_s - self.from_s
        return known_s, (self.bytes - self.from_bytes) / max(known_s, 0.001)


class IncomingRoom:
    """The bytes of the messages whose end has not arrived, by their connection."""

    def __init__(self, bytes_max: int = BYTES_MAX) -> None:
        self.bytes_max = bytes_max
        self.held_bytes = 0
        self._held: dict[Hashable, _BegunMessage] = {}
        self._look_s = float("-inf")
        """The time at which the next check of all messages is due, while they hold more than
        `bytes_max`.
        """

    def note(
        self, connection: Hashable, size: int, now_s: float, give_up: Callable[[], object]
    ) -> None:
        """
        Note that `size` bytes of a message have arrived, and give up messages while all together
        have too many.

        Args:
            now_s: the time, by one clock for all connections.
            give_up: ends the connection, which calls `free`.
        """
        begun = self._held.get(connection)
        if begun is None:
            begun = self._held[connection] = _BegunMessage(now_s, give_up)
        self.held_bytes += size - begun.bytes
        begun.bytes = size
        if self.held_bytes <= self.bytes_max:
            return
        hard_bytes = HARD_FACTOR * self.bytes_max
        if self.held_bytes > hard_bytes:
            self._give_up_slowest(now_s, int(hard_bytes * HARD_SHARE))
        elif now_s >= self._look_s:
            self._look_s = now_s + LOOK_S
            self._give_up_slowest(now_s, self.bytes_max, only_stuck=True)

    def pause(self, connection: Hashable, now_s: float) -> None:
        """
        Record that the server has stopped reading a connection. This does nothing if it has no
        unfinished message.
        """
        begun = self._held.get(connection)
        if begun is not None and begun.paused_s is None:
            begun.paused_s = now_s

    def resume(self, connection: Hashable, now_s: float) -> None:
        """Record that the server reads a connection again."""
        begun = self._held.get(connection)
        if begun is not None and begun.paused_s is not None:
            begun.from_s += now_s - begun.paused_s
            begun.later_s += now_s - begun.paused_s
            begun.paused_s = None

    def free(self, connection: Hashable) -> None:
        """Note that the message of a connection is whole, or given up; the connection may have no
        message.
        """
        begun = self._held.pop(connection, None)
        if begun is not None:
            self.held_bytes -= begun.bytes

    def _give_up_slowest(
        self, now_s: float, down_to_bytes: int, *, only_stuck: bool = False
    ) -> None:
        """
        Give up messages, the slowest first, until the others hold `down_to_bytes`.

        Args:
            only_stuck: give up only those whose rate is known and below RATE_MIN.
        """
        ranked = []
        for connection, begun in self._held.items():
            known_s, rate = begun.seen(now_s)
            young = known_s < PATIENCE_S
            if not only_stuck or (rate < RATE_MIN and not young):
                ranked.append((young, rate, connection, begun.give_up))
        ranked.sort(key=lambda each: each[:2])
        for _, _, connection, give_up in ranked:
            if self.held_bytes <= down_to_bytes:
                return
            self.free(connection)
            give_up()
