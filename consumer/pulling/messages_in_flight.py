"""A bounded counter: the messages of a partition that are with handlers.

One task waits at a time: pulling waits for capacity, and once pulling has ended, the hand-over
waits for zero.
"""

from __future__ import annotations

import asyncio

RESUME_SHARE = 2
"""The divisor for the limit: a full counter has capacity again when it is down to 1/RESUME_SHARE of
it.
"""
NO_WAITER = -1


class MessagesInFlight:
    """
    Counts messages handed out and not yet handled or forgotten.

    `count` and `wake_at` are public for the hot path: a handled message subtracts one from `count`,
    and calls `wake` if `count` is down to `wake_at`.

    Args:
        retrying_max: the most messages waiting for their next try that do not count against the
            limit.
    """

    __slots__ = ("_blocked", "_event", "_retrying", "_retrying_max", "count", "wake_at")

    def __init__(self, *, retrying_max: int = 0) -> None:
        self.count = 0
        self._retrying = 0
        self._retrying_max = retrying_max
        self.wake_at = NO_WAITER
        """The value of `count` for which a task waits."""
        self._blocked = False
        self._event = asyncio.Event()

    def wake(self) -> None:
        """Let the waiting task check again."""
        self._event.set()

    def remove(self, count: int) -> None:
        """Note that `count` messages were handled or forgotten."""
        self.count -= count
        if self.count <= self.wake_at:
            self.wake()

    def block(self) -> None:
        """Refuse capacity until `unblock`, however low the count is."""
        self._blocked = True

    def unblock(self) -> None:
        """Let the count alone decide again."""
        if self._blocked:
            self._blocked = False
            self.wake()

    def add_retrying(self, count: int) -> None:
        """Note that `count` more messages wait for their next try; fewer, if it is negative."""
        self._retrying += count
        if count > 0 and self.wake_at != NO_WAITER:
            self.wake()

    def capacity(self, limit: int) -> int:
        """Return the number of further messages that fit; 0 or less if none does."""
        return limit - self.count + min(self._retrying, self._retrying_max)

    @property
    def blocked(self) -> bool:
        """Return True between `block` and `unblock`."""
        return self._blocked

    def has_capacity(self, limit: int) -> bool:
        """Return True if one more message fits, and nothing blocks."""
        return not self._blocked and (self.count < limit or self.capacity(limit) > 0)

    async def wait_for_capacity(self, limit: int) -> None:
        """Wait, if the counter is full, until the count is down to limit/RESUME_SHARE
        (hysteresis).
        """
        while not self.has_capacity(limit):
            await self._down_to(limit // RESUME_SHARE + min(self._retrying, self._retrying_max))

    async def changed(self) -> None:
        """Wait until a message is handled, dropped or scheduled for a retry, or `wake` is
        called.
        """
        await self._down_to(self.count - 1)

    async def wait_until_empty(self) -> None:
        """Wait until every message is handled or dropped."""
        while self.count > 0:
            await self._down_to(0)

    async def _down_to(self, count: int) -> None:
        self.wake_at = count
        self._event.clear()
        await self._event.wait()
        self.wake_at = NO_WAITER
