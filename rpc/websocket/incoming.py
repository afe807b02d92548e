"""What the messages that have begun to come hold together, at a server; over a limit, those that began first are given up.  Pure."""

from __future__ import annotations

from collections.abc import Callable, Hashable

BYTES_MAX = 256 << 20
PATIENCE_S = 2.0
"""A message that began later is given up only above HARD_FACTOR * BYTES_MAX: honest clients send one in less time."""
HARD_FACTOR = 4


class IncomingRoom:
    """The bytes of messages whose end has not come, by the connection that they come on."""

    def __init__(self, bytes_max: int = BYTES_MAX) -> None:
        self.bytes_max = bytes_max
        self.held_bytes = 0
        self._held: dict[Hashable, tuple[int, float, Callable[[], object]]] = {}
        """Connection → bytes, when the message began, and what gives it up; the oldest message first."""

    def note(
        self,
        connection: Hashable,
        size: int,
        begun_s: float,
        now_s: float,
        give_up: Callable[[], object],
    ) -> None:
        """
        Note that a message has `size` bytes of memory now, and give up others while all have too many.

        Args:
            begun_s: when it began, and `now_s`, by one clock.
            give_up: ends its connection, which calls `free`.
        """
        before = self._held.get(connection)
        self.held_bytes += size - (before[0] if before is not None else 0)
        self._held[connection] = size, begun_s, give_up
        while self.held_bytes > self.bytes_max:
            oldest = next(iter(self._held))
            _, oldest_s, give_up_oldest = self._held[oldest]
            if now_s - oldest_s < PATIENCE_S and self.held_bytes <= HARD_FACTOR * self.bytes_max:
                return
            self.free(oldest)
            give_up_oldest()

    def free(self, connection: Hashable) -> None:
        """Note that the message of a connection is whole, or given up; it may have none."""
        held = self._held.pop(connection, None)
        if held is not None:
            self.held_bytes -= held[0]
