"""A bounded counter of a partition's messages in flight.

At most one task waits at a time: the pull task waits for capacity, and after it has ended, the
hand-over waits for zero.
"""

from __future__ import annotations

import asyncio

RESUME_SHARE = 2
"""Once the limit is reached, pulling resumes when the count has fallen to 1/RESUME_SHARE of it."""
NO_WAITER = -1


class MessagesInFlight:
    """
    Counts messages that are handed out and not yet handled or dropped.

    `count` and `wake_at` are public for the hot path: each handled message decrements `count`, and
    calls `wake` when it is down to `wake_at`.

    Args:
        retrying_max: how many messages that wait for a retry do not count against the limit.
    """

    __slots__ = ("_blocked", "_event", "_retrying", "_retrying_max", "count", "wake_at")

    def __init__(self, *, retrying_max: int = 0) -> None:
        self.count = 0
        self._retrying = 0
        self._retrying_max = retrying_max
        self.wake_at = NO_WAITER
        """The value of `count` that a task waits for."""
        self._blocked = False
        self._event = asyncio.Event()

    def wake(self) -> None:
        """Wake the waiting task, which then checks again."""
        self._event.set()

    def remove(self, count: int) -> None:
        """Subtract `count` messages that were handled or dropped."""
        self.count -= count
        if self.count <= self.wake_at:
            self.wake()

    def block(self) -> None:
        """Report no capacity until `unblock`, regardless of the count."""
        self._blocked = True

    def unblock(self) -> None:
        """Undo `block`."""
        if self._blocked:
            self._blocked = False
            self.wake()

    def add_retrying(self, count: int) -> None:
        """Change the number of messages that wait for a retry by `count`."""
        self._retrying += count
        if count > 0 and self.wake_at != NO_WAITER:
            self.wake()

    def capacity(self, limit: int) -> int:
        """Return how many more messages fit under `limit`; 0 or less if none fit."""
        return limit - self.count + min(self._retrying, self._retrying_max)

    @property
    def blocked(self) -> bool:
        """True between `block` and `unblock`."""
        return self._blocked

    def has_capacity(self, limit: int) -> bool:
        """Return True if one more message fits, and the counter is not blocked."""
        return not self._blocked and (self.count < limit or self.capacity(limit) > 0)

    async def wait_for_capacity(self, limit: int) -> None:
        """If there is no capacity, wait until the count has fallen to limit/RESUME_SHARE
        (hysteresis).
        """
        while not self.has_capacity(limit):
            await self._wait_down_to(
                limit // RESUME_SHARE + min(self._retrying, self._retrying_max)
            )

    async def wait_for_change(self) -> None:
        """Wait until a message is handled, dropped or scheduled for a retry, or `wake` is
        called.
        """
        await self._wait_down_to(self.count - 1)

    async def wait_until_empty(self) -> None:
        """Wait until every message is handled or dropped."""
        while self.count > 0:
            await self._wait_down_to(0)

    async def _wait_down_to(self, count: int) -> None:
        self.wake_at = count
        self._event.clear()
        await self._event.wait()
        self.wake_at = NO_WAITER
